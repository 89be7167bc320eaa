"""Corrections of Triton's interpreter in tests/conftest.py; a GPU's compiler passes the same test."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _arithmetic(x, y, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    a, b = tl.load(x + index), tl.load(y + index)
    tl.store(out + index, a * b + a - b)
    tl.store(out + SIZE + index, tl.where(a < b, a, 1.5))
    tl.store(out + 2 * SIZE + index, tl.maximum(a, b))
    tl.store(out + 3 * SIZE + index, tl.minimum(a, b))
    tl.store(out + 4 * SIZE + index, a.to(tl.float32).to(tl.bfloat16).to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_rounds_as_in_torch_and_a_maximum_ignores_nan(device, rng, dtype):
    special = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), torch.inf, -torch.inf, 3.4e38, 1e-40, 0])
    x = torch.cat([special, 100 * torch.randn(56, generator=rng)]).to(device, dtype)
    y = torch.randn(64, generator=rng).to(device, dtype)
    if dtype == torch.float32:
        x[5::3], y[::5] = torch.nan, torch.nan
    out = torch.empty(5, 64, dtype=dtype, device=device)

    _arithmetic[(1,)](x, y, out, SIZE=64)

    exactly = (torch.where(x < y, x, 1.5), torch.fmax(x, y), torch.fmin(x, y), x.bfloat16().to(dtype))
    for got, expected in zip(out[1:], exactly, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    finite = slice(8, None)
    torch.testing.assert_close(
        out[0, finite], (x * y + x - y)[finite], rtol=2**-6, atol=2**-6, equal_nan=True
    )
