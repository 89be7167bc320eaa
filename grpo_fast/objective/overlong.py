"""Completions at the length limit: masked, or penalised smoothly. DAPO, arXiv 2503.14476, section 3.4."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_overlong(loss_mask: Tensor, sequence_ids: Tensor, truncated: Tensor) -> Tensor:
    """Overlong filtering: truncated completions leave the loss.

    Args:
        loss_mask: (N,) bool.
        sequence_ids: (N,) int64 in [0, S).
        truncated: (S,) bool: stopped by the length limit.

    Returns:
        (N,) bool.
    """
    return loss_mask & ~truncated[sequence_ids]


def soft_overlong_penalty(lengths: Tensor, max_length: int, margin: int) -> Tensor:
    """What to add to the reward of each completion, eq. 13.

    Zero up to `max_length − margin` tokens, from there down a straight line to −1 at `max_length`, −1 beyond.

    Args:
        lengths: (S,) tokens of each completion.
        max_length: the length from which the penalty is full.
        margin: width of the slope, DAPO's L_cache.

    Returns:
        (S,) float32 in [−1, 0].

    Raises:
        ValueError: margin is not within (0, max_length].
    """
    if not 0 < margin <= max_length:
        raise ValueError(
            f"margin = {margin} must be positive and at most max_length = {max_length}; change it"
        )
    return ((max_length - margin - lengths.to(torch.float32)) / margin).clamp(-1.0, 0.0)
