"""What the head is measured on: a setting, a batch of S equally long sequences, and the losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"
MODES = (FORWARD_BACKWARD, FORWARD)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LOGPROB, GRPO, CROSS_ENTROPY, DPO = LOSSES = ("logprob", "grpo", "cross_entropy", "dpo")
NAMES = {LOGPROB: "log-probabilities", GRPO: "GRPO", CROSS_ENTROPY: "cross-entropy", DPO: "DPO"}
CLIP, KL_BETA, DPO_BETA = 0.2, 0.04, 0.1
PRODUCT = "X Wᵀ"
"""The reference of the head's times: one product by the vendor's library."""


@dataclass(frozen=True)
class Setting:
    """One shape of the head, in which all implementations are measured together."""

    rows: str  # one of `rows.KINDS`
    tokens: int  # N
    hidden: int  # H
    vocabulary: int  # V
    mode: str  # one of MODES
    trainable: bool  # whether the head's weight takes a gradient
    dtype: str  # a key of DTYPES
    loss: str = LOGPROB  # one of LOSSES


@dataclass(frozen=True)
class Problem:
    """One batch, and the loss that its log-probabilities end in."""

    hidden: Tensor  # (N, H) leaf
    weight: Tensor  # (V, H) leaf; requires a gradient where the head is trainable
    targets: Tensor  # (N,) int64
    advantages: Tensor  # (N,) float32, equal within a sequence, none zero
    sequences: int  # of N / sequences tokens each, in order
    backward: bool
    loss: str = LOGPROB  # one of LOSSES
    old_logprobs: Tensor | None = None  # (N,) float32, of the GRPO loss alone
    ref_logprobs: Tensor | None = None  # (N,) float32, likewise

    def finish(self, logprobs: Tensor) -> Outcome:
        """Return the outcome of log-probabilities (N,), after their loss and its gradient."""
        logprobs = logprobs.reshape(-1)
        return self.finish_loss(loss_of(self, logprobs), logprobs)

    def finish_loss(self, loss: Tensor, logprobs: Tensor | None = None) -> Outcome:
        """Return the outcome of a loss (), after its gradient."""
        if self.backward:
            loss.backward()
        return Outcome(None if logprobs is None else logprobs.detach(), loss=loss.detach())

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None


@dataclass(frozen=True)
class Outcome:
    """What one run returns; gradients lie in the problem's `.grad`."""

    logprobs: Tensor | None = None  # (N,) detached; None where an implementation keeps them to itself
    certificate: dict[str, Tensor] | None = None  # scalars on the device
    loss: Tensor | None = None  # () detached; None where it is another number with the same gradient


Run = Callable[[], Outcome]


def call(run: Run, problem: Problem) -> Outcome:
    """Run once, with gradients where the problem has a backward; those of the last time are dropped."""
    problem.clear()
    with torch.set_grad_enabled(problem.backward):
        return run()


def multiplication(operands: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Return a function of one X Wᵀ a call, of each (N, H) and (V, H) in turn, in parts where it is huge."""
    (x, w), *_ = operands
    room = torch.cuda.mem_get_info(x.device)[0] // 8 if x.is_cuda else 1 << 28  # bytes
    rows = max(1, min(len(x), room // (len(w) * x.element_size())))
    out = x.new_empty(rows, len(w))
    turns = itertools.cycle(operands)

    def run() -> None:
        x, w = next(turns)
        for part in x.split(rows):
            torch.mm(part, w.T, out=out[: len(part)])

    return run


def loss_of(problem: Problem, logprobs: Tensor) -> Tensor:
    """Return the problem's loss () of the targets' log-probabilities (N,)."""
    if problem.loss == LOGPROB:  # REINFORCE, and the gradient of GRPO exactly on-policy
        return -(problem.advantages * logprobs).mean()
    if problem.loss == GRPO:
        return _grpo(problem, logprobs)
    if problem.loss == DPO:
        return _dpo(problem, logprobs)
    return -logprobs.mean()


def _grpo(problem: Problem, logprobs: Tensor) -> Tensor:
    """Return GRPO's (DeepSeekMath, arXiv 2402.03300, eq. 3 and 4); sequences have one length."""
    ratio = (logprobs - problem.old_logprobs).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.minimum(ratio * problem.advantages, clipped * problem.advantages)
    away = problem.ref_logprobs - logprobs
    return (KL_BETA * (torch.expm1(away) - away) - surrogate).mean()


def _dpo(problem: Problem, logprobs: Tensor) -> Tensor:
    """Return DPO's (arXiv 2305.18290, eq. 7). Pair i is sequence i, chosen, and i + S/2, rejected.

    The reference's sums are the same for both of a pair, so that they cancel: Liger's fused loss takes none.
    """
    chosen, rejected = logprobs.view(2, problem.sequences // 2, -1).sum(2)
    return -logsigmoid(DPO_BETA * (chosen - rejected)).mean()
