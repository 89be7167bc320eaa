"""The launches that `benchmarks.aot` compiles: what the head calls, on meta tensors of a real shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

ROWS = 16_384
VOCABULARY = 151_936


def shipped_cases(capability: int) -> dict[str, Callable[[], None]]:
    """Name of the case to the call that launches its kernels."""
    return sparse_cases()


def sparse_cases() -> dict[str, Callable[[], None]]:
    """Every dtype and option that changes the machine code of the certified sparse backward."""
    cases = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        cases[f"sparse {name} H=2048"] = partial(_sparse_backward, dtype, 2048)
    plain = partial(_sparse_backward, torch.bfloat16)
    for width in (896, 1536, 4096, 7168):
        cases[f"sparse bfloat16 H={width}"] = partial(plain, width)
    cases["sparse bfloat16 H=2044 (odd)"] = partial(plain, 2044)
    cases["sparse bfloat16 frozen head"] = partial(plain, 2048, want_weight=False)
    cases["sparse bfloat16 frozen body"] = partial(plain, 2048, want_hidden=False)
    cases["sparse bfloat16 bias, temperature, softcap"] = partial(plain, 2048, transformed=True)
    cases["sparse bfloat16 into a float32 gradient"] = partial(plain, 2048, accumulate=True)
    cases["sparse bfloat16 V=262144"] = partial(plain, 2048, vocabulary=262_144)
    return cases


def _sparse_backward(
    dtype: torch.dtype,
    depth: int,
    *,
    vocabulary: int = VOCABULARY,
    want_hidden: bool = True,
    want_weight: bool = True,
    transformed: bool = False,
    accumulate: bool = False,
) -> None:
    from grpo_fast.kernels import TILE
    from grpo_fast.kernels.select import select_pairs
    from grpo_fast.kernels.sparse import sparse_backward

    def vector(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(ROWS, dtype=dtype, device="meta")

    def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    hidden, weight = matrix(ROWS, depth, dtype), matrix(vocabulary, depth, dtype)
    targets, logsumexp = vector(torch.int64), vector()
    pairs = select_pairs(
        matrix(-(-vocabulary // TILE), ROWS, torch.float32), logsumexp, targets, vector(), vector(),
        vocabulary=vocabulary, tolerance=1.0, itemsize=dtype.itemsize,
    )  # fmt: skip
    sparse_backward(
        hidden, weight, targets, logsumexp, pairs, want_hidden=want_hidden, want_weight=want_weight,
        bias=weight[:, 0] if transformed else None, want_bias=transformed,
        inv_temperature=vector() if transformed else None, softcap=30.0 if transformed else None,
        weight_gradient=matrix(vocabulary, depth, torch.float32) if accumulate else None,
    )  # fmt: skip
