"""`linear_logprob` under the LM head that TRL's trainers share, in one line, and undone in one.

GRPO, RLOO, DPO, KTO and SFT project hidden states to log-probabilities by one fused LM head. Its model
forward looks two names up in `trl.trainer.utils` on every call: the head's function, and whether to hand it
only the rows that are scored.
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
    """Lets TRL's trainers call `head.apply` as they would call their autograd function's, until closed."""
    replacements = Replacements()
    replacements.replace(utils, "_ChunkedLogProbFunction", head)
    triton_devices = utils._use_triton

    def scores_live_rows_only(device: torch.device) -> bool:
        # TRL scores every row on CPU too; nothing is recompiled there when their number changes.
        return device.type == "cpu" or triton_devices(device)

    replacements.replace(utils, "_use_triton", scores_live_rows_only)
    return replacements


def patch() -> None:
    """Makes every TRL trainer of this process score its tokens with `grpo_fast.linear_logprob`.

    Trainers that exist already are included. Calling it again changes nothing.
    """
    unpatch()
    _patch.enter_context(replace_head(FusedHead))


def unpatch() -> None:
    """Gives TRL its own objects back. Without a `patch` before it changes nothing."""
    _patch.close()


@contextmanager
def patched() -> Iterator[None]:
    """`patch` for as long as the block runs; one that was in force before stays."""
    with replace_head(FusedHead):
        yield


class FusedHead:
    """Called as TRL calls `ChunkedLogProbFunction`, with the same five results."""

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
        """Log-probability, entropy, log Σ p², mean logit and whether the target is the argmax.

        A result that is not among `outputs` is None. The first two are differentiable. Of several largest
        logits each is the argmax. TRL counts the first only; to know which that is would take a second
        pass over the head, and among float32 logits only equal rows of the head tie.

        Args:
            hidden: (N, H); logits are computed from its dtype, or autocast's, into float32.
            weight: (V, H).
            bias: (V,).
            targets: (N,) int64.
            chunk_size: of no effect: no tile of logits reaches memory.
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
    """`score(hidden, weight, bias)`, whose backward runs with weight and bias gathered again.

    By then ZeRO-3 has taken the weight away: the graph remembers the parameter, not its entries, so it is
    enough that the entries are back when the graph is walked.
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
