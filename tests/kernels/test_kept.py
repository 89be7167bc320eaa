"""The logit gradient from kept exponentials against the dense one in float64."""

from __future__ import annotations

import pytest
import torch
from grpo_fast.kernels import TILE
from grpo_fast.kernels.kept import Kept, allocate, kept_gradient


def keep(head) -> Kept:
    """What the forward keeps, from the dense head."""
    logits = (head.probability.log() + head.logsumexp[:, None]).float()
    largest = torch.stack([tile.amax(1) for tile in logits.split(TILE, 1)])
    exponentials = allocate(*logits.shape, head.hidden)
    exponentials.copy_((logits - largest.T.repeat_interleave(TILE, 1)[:, : logits.shape[1]]).exp())
    return Kept(exponentials, largest)


def run(head, kept: Kept, start: int, width: int) -> torch.Tensor:
    rows, inv_scale = head.targets.numel(), torch.tensor(0.5, device=head.hidden.device)
    gradient = torch.full((rows, width), torch.nan, dtype=head.hidden.dtype, device=head.hidden.device)
    kept_gradient(kept, head.problem, head.gradient, inv_scale, gradient, start)
    return gradient


@pytest.mark.parametrize(("start", "width"), [(0, 300), (128, 172), (0, 128), (256, 44)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_chunk_is_the_dense_gradient_and_every_entry_is_written(make_head, start, width, dtype):
    head = make_head(37, 300, dtype=dtype)

    got = run(head, keep(head), start, width)

    exact = 0.5 * head.logit_gradient[:, start : start + width]
    limit = 1e-5 if dtype == torch.float32 else 2**-7  # two roundings of 2^-8 each
    torch.testing.assert_close(got.double(), exact, rtol=limit, atol=1e-6)


def test_rows_without_a_gradient_are_zero_whatever_was_kept(make_head):
    head = make_head(37, 300)
    kept, idle = keep(head), (head.targets < 0) | (head.g == 0)
    kept.exponentials[idle] = torch.nan
    kept.maximum[:, idle] = torch.nan

    got = run(head, kept, 0, 300)

    assert not got[idle].any()
    assert not got.isnan().any()
