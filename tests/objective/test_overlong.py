"""Completions at the length limit."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.objective.overlong import mask_overlong, soft_overlong_penalty


def test_the_penalty_is_zero_then_a_slope_then_minus_one() -> None:
    lengths = torch.tensor([1, 80, 81, 90, 100, 101])

    penalty = soft_overlong_penalty(lengths, max_length=100, margin=20)

    assert penalty.tolist() == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])


@pytest.mark.parametrize("margin", [0, -1, 101])
def test_a_margin_that_makes_no_slope_is_refused(margin: int) -> None:
    with pytest.raises(ValueError, match=f"margin = {margin}"):
        soft_overlong_penalty(torch.tensor([1]), max_length=100, margin=margin)


def test_truncated_completions_leave_the_mask_and_others_keep_theirs() -> None:
    loss_mask = torch.tensor([True, False, True, True])

    masked = mask_overlong(loss_mask, torch.tensor([0, 0, 1, 1]), truncated=torch.tensor([False, True]))

    assert masked.tolist() == [True, False, False, False]
