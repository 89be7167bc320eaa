"""What the session corrects in Triton's interpreter. On a GPU the compiler passes the same tests."""

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
    tl.store(out + 4 * SIZE + index, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _round_trip(x, narrowed, widened, integers, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    narrow = tl.load(x + index).to(tl.bfloat16)
    tl.store(narrowed + index, narrow)
    tl.store(widened + index, narrow.to(tl.float32))
    tl.store(integers + index, tl.where(index < 8, 0.0, narrow).to(tl.int32))


@triton.jit
def _product(a, b, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    block = index[:, None] * SIZE + index[None, :]
    tl.store(out + block, tl.dot(tl.load(a + block), tl.trans(tl.load(b + block))))


@triton.jit
def _sum(x, out, SIZE: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, SIZE))))


@triton.jit
def _load_some(x, out, size, enough, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, tl.load(x + index, mask=(index < size) & (tl.load(enough) > 0), other=2.0))


def test_a_mask_may_hang_on_a_loaded_number(device):
    out = torch.empty(2, 8, device=device)

    for enough in (0, 1):
        found = torch.tensor(enough, dtype=torch.int32, device=device)
        _load_some[(1,)](torch.ones(8, device=device), out[enough], 5, found, SIZE=8)

    assert out.tolist() == [[2.0] * 8, [1.0] * 5 + [2.0] * 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_arithmetic_rounds_as_torch_and_a_maximum_ignores_nan(device, rng, dtype):
    x, y = (torch.randn(64, generator=rng).to(device, dtype) for _ in range(2))
    if dtype == torch.float32:
        x[::3], y[::5] = torch.nan, torch.nan
    out = torch.empty(5, 64, dtype=dtype, device=device)

    _arithmetic[(1,)](x, y, out, SIZE=64)

    exactly = (torch.where(x < y, x, 1.5), torch.fmax(x, y), torch.fmin(x, y), torch.maximum(x, y))
    for got, expected in zip(out[1:], exactly, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out[0], x * y + x - y, rtol=2**-6, atol=2**-6, equal_nan=True)


def test_conversion_to_bf16_rounds_to_even_and_keeps_infinities_and_nan(device, rng):
    special = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40]
    )
    x = torch.cat([special, torch.randn(56, generator=rng) * 100]).to(device)
    narrowed = torch.empty(64, dtype=torch.bfloat16, device=device)
    widened = torch.empty(64, device=device)
    integers = torch.empty(64, dtype=torch.int32, device=device)

    _round_trip[(1,)](x, narrowed, widened, integers, SIZE=64)

    torch.testing.assert_close(narrowed, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(widened, x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(integers[8:], x[8:].bfloat16().int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_products_accumulate_in_float32(device, rng, dtype):
    a, b = (torch.randn(64, 64, generator=rng).to(device, dtype) for _ in range(2))
    out = torch.empty(64, 64, device=device)

    _product[(1,)](a, b, out, SIZE=64)

    torch.testing.assert_close(out, a.float() @ b.float().T, rtol=1e-5, atol=1e-4)


def test_a_bf16_reduction_is_refused_rather_than_summed_as_integers(device):
    if device.type == "cuda":
        pytest.skip("the compiler reduces bfloat16 correctly")
    with pytest.raises(Exception, match="cast to float32"):
        _sum[(1,)](torch.ones(64, dtype=torch.bfloat16), torch.empty(1, dtype=torch.bfloat16), SIZE=64)


def test_memory_that_nobody_wrote_is_garbage(device):
    if device.type == "cuda":
        pytest.skip("what the allocator hands out again is not known")

    assert torch.empty(3, 5).isnan().all()
    assert torch.ones(4).new_empty(2, dtype=torch.int32).eq(2**31 - 1).all()
