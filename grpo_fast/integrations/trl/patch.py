"""Replace the fused LM head that TRL's trainers share by `linear_logprob`.

TRL's model forward looks up two names in `trl.trainer.utils` on every call: the head's function, and whether
to pass it only the rows that are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from grpo_fast.head import linear_logprob
from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import Replacements

utils = private("trl", "trainer.utils")

HeadResults = tuple[Tensor | None, ...]  # five
Score = Callable[[Tensor, Tensor, Tensor | None], HeadResults]  # of hidden states, weight and bias

_OUTPUTS = {
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "argmax_is_target",
}
_patch = Replacements()


def replace_head(head: Any) -> Replacements:
    """Let TRL's trainers call `head.apply` in place of their autograd function's, until closed."""
    replacements = Replacements()
    replacements.replace(utils, "_ChunkedLogProbFunction", head)
    triton_devices = utils._use_triton

    def scores_live_rows_only(device: torch.device) -> bool:
        # On a CPU, TRL scores every row; ours does not recompile when their number changes.
        return device.type == "cpu" or triton_devices(device)

    replacements.replace(utils, "_use_triton", scores_live_rows_only)
    return replacements


def patch() -> None:
    """Make every TRL trainer of this process, old or new, score tokens by `linear_logprob`. Idempotent."""
    unpatch()
    _patch.enter_context(replace_head(FusedHead))


def unpatch() -> None:
    """Undo `patch`, if it was called."""
    _patch.close()


@contextmanager
def patched() -> Iterator[None]:
    """Patch while the block runs; an earlier `patch` stays."""
    with replace_head(FusedHead):
        yield


class FusedHead:
    """Replaces `ChunkedLogProbFunction`: the same arguments and five results."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = tuple(_OUTPUTS),
    ) -> HeadResults:
        """Compute log-probability, entropy, log Σ p², mean logit and whether the target is the argmax.

        A result that is not among `outputs` is None. The first two are differentiable. Where several logits
        are the largest, each of them is the argmax, in TRL only the first.

        Args:
            hidden: (N, H); logits are computed from its dtype, or autocast's, into float32.
            weight: (V, H).
            bias: (V,).
            targets: (N,) int64.
            chunk_size: ignored.
        """
        wanted = tuple(ours for theirs, ours in _OUTPUTS.items() if theirs in outputs)

        def score(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> HeadResults:
            out = linear_logprob(
                hidden,
                weight.to(hidden.dtype),
                targets,
                bias=bias,
                temperature=temperature,
                logit_scale=logit_scale,
                softcap=final_logit_softcapping,
                outputs=("logprob", *wanted),
            )
            mean_logit = None if out.mean_logit is None else out.mean_logit.detach()
            return out.logprob, out.entropy, out.log_sum_sq_probs, mean_logit, out.argmax_is_target

        if is_deepspeed_zero3_enabled():
            return _BackwardGathered.apply(score, hidden, weight, bias)
        return score(hidden, weight, bias)


class _BackwardGathered(torch.autograd.Function):
    """Compute `score(hidden, weight, bias)`; its backward runs with weight and bias gathered again.

    ZeRO-3 frees them after the forward. The graph refers to the parameters, so it is enough that their
    entries are back during the backward.
    """

    @staticmethod
    def forward(ctx: Any, score: Score, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> HeadResults:
        with torch.enable_grad():
            inner = hidden.detach().requires_grad_(hidden.requires_grad)
            ctx.results = score(inner, weight, bias)
        ctx.inputs = (inner, weight, bias)
        ctx.set_materialize_grads(False)
        copies = [None if result is None else result.detach() for result in ctx.results]
        pairs = zip(ctx.results, copies, strict=True)
        ctx.mark_non_differentiable(
            *(copy for result, copy in pairs if copy is not None and not result.requires_grad)
        )
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> HeadResults:
        given = [pair for pair in zip(ctx.results, gradients, strict=True) if pair[1] is not None]
        results, of_results = zip(*given, strict=True)
        wanted = [tensor is not None and tensor.requires_grad for tensor in ctx.inputs]
        leaves = [tensor for tensor, asked in zip(ctx.inputs, wanted, strict=True) if asked]
        with utils.maybe_gather_lm_head_ctx(*ctx.inputs[1:]):
            found = iter(torch.autograd.grad(results, leaves, of_results))
        return None, *(next(found) if asked else None for asked in wanted)
