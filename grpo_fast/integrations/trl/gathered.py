"""A head whose weight is there only while it is gathered: DeepSpeed ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_fast.integrations.trl.seam import HeadResults, trl_utils

Score = Callable[[Tensor, Tensor, "Tensor | None"], HeadResults]


def is_zero3_enabled() -> bool:
    """Whether DeepSpeed partitions the parameters."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    return is_deepspeed_zero3_enabled()


def walk_gathered(score: Score, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> HeadResults:
    """`score(hidden, weight, bias)`, whose backward runs with weight and bias gathered again.

    By then ZeRO-3 has taken the weight away: the graph remembers the parameter, not its entries, so it is
    enough that the entries are back when the graph is walked.
    """
    return _WalkedGathered.apply(score, hidden, weight, bias)


class _WalkedGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: Score, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> HeadResults:
        with torch.enable_grad():
            inner = hidden.detach().requires_grad_(hidden.requires_grad)
            ctx.results = score(inner, weight, bias)
        ctx.inputs = (inner, weight, bias)
        ctx.set_materialize_grads(False)
        detached = tuple(None if result is None else result.detach() for result in ctx.results)
        ctx.mark_non_differentiable(
            *(
                copy
                for copy, result in zip(detached, ctx.results, strict=True)
                if result is not None and not result.requires_grad
            )
        )
        return detached

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_results = [
            (result, gradient)
            for result, gradient in zip(ctx.results, gradients, strict=True)
            if gradient is not None
        ]
        wanted = [tensor for tensor in ctx.inputs if tensor is not None and tensor.requires_grad]
        _, weight, bias = ctx.inputs
        with trl_utils().maybe_gather_lm_head_ctx(weight, bias):
            found = iter(
                torch.autograd.grad(
                    [result for result, _ in of_results], wanted, [gradient for _, gradient in of_results]
                )
            )
        return (
            None,
            *(next(found) if tensor is not None and tensor.requires_grad else None for tensor in ctx.inputs),
        )
