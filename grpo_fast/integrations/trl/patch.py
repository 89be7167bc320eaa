"""`linear_logprob` under the LM head that TRL's trainers share, in one line, and undone in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from grpo_fast.head import linear_logprob
from grpo_fast.integrations.trl.gathered import is_zero3_enabled, walk_gathered
from grpo_fast.integrations.trl.seam import HeadResults, exchange, restore

_OUTPUTS = {
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "argmax_is_target",
}
_before: dict[str, Any] | None = None  # what stood at the seam before `patch`


def patch() -> None:
    """Makes every TRL trainer of this process score its tokens with `grpo_fast.linear_logprob`.

    Trainers that exist already are included. Calling it again changes nothing.

    Raises:
        RuntimeError: a TRL version whose fused LM head is not known.
    """
    global _before
    if _before is None:
        _before = exchange(FusedHead)


def unpatch() -> None:
    """Gives TRL its own objects back. Without a `patch` before it changes nothing."""
    global _before
    if _before is not None:
        restore(_before)
        _before = None


@contextmanager
def patched() -> Iterator[None]:
    """`patch` for as long as the block runs; one that was in force before stays."""
    mine = _before is None
    patch()
    try:
        yield
    finally:
        if mine:
            unpatch()


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

        if is_zero3_enabled():
            return walk_gathered(score, hidden, weight, bias)
        return score(hidden, weight, bias)
