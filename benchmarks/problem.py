"""Inputs of the head's benchmarks: settings, batches of S equally long sequences, and losses."""

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
LOGPROB, GRPO, CROSS_ENTROPY, DPO = TOKEN_LOSSES = ("logprob", "grpo", "cross_entropy", "dpo")
KL = "kl"  # of the whole vocabulary
LOSSES = (*TOKEN_LOSSES, KL)
NAMES = {LOGPROB: "log-probabilities", GRPO: "GRPO", CROSS_ENTROPY: "cross-entropy", DPO: "DPO", KL: "KL"}
CLIP, KL_BETA, DPO_BETA = 0.2, 0.04, 0.1
PRODUCT = "X Wᵀ"  # by the vendor's library, the reference of the head's times


class Unsupported(Exception):
    """Raised where an implementation cannot do what is asked; the message is the reason shown."""


@dataclass(frozen=True)
class Setting:
    """One setting of the head, in which all implementations are measured."""

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
    """One batch and its loss."""

    hidden: Tensor  # (N, H) leaf
    weight: Tensor  # (V, H) leaf; requires a gradient where the head is trainable
    targets: Tensor  # (N,) int64
    advantages: Tensor  # (N,) float32, equal within a sequence, none zero
    sequences: int  # of N / sequences tokens each, in order
    backward: bool
    loss: str = LOGPROB  # one of LOSSES
    old_logprobs: Tensor | None = None  # (N,) float32, of GRPO alone
    ref_logprobs: Tensor | None = None  # (N,) float32, of GRPO alone
    ref_hidden: Tensor | None = None  # (N, H), of KL alone
    ref_weight: Tensor | None = None  # (V, H), of KL alone

    def finish(self, logprobs: Tensor) -> Outcome:
        """Compute the loss of log-probabilities (N,), and its gradient."""
        if self.loss == KL:
            raise Unsupported("computes log-probabilities of single tokens")
        logprobs = logprobs.reshape(-1)
        return self.finish_loss(loss_of(self, logprobs), logprobs)

    def finish_loss(self, loss: Tensor, values: Tensor | None = None) -> Outcome:
        """Compute the gradient of a loss () of values (N,): log-probabilities, or divergences."""
        if self.backward:
            loss.backward()
        return Outcome(None if values is None else values.detach(), loss=loss.detach())

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None


@dataclass(frozen=True)
class Outcome:
    """Results of one run; gradients are in the problem's `.grad`."""

    values: Tensor | None = None  # (N,) detached log-probabilities or divergences; None where not returned
    certificate: dict[str, Tensor] | None = None  # scalars on the device
    loss: Tensor | None = None  # () detached; None where it is another number with the same gradient


Run = Callable[[], Outcome]


def call(run: Run, problem: Problem) -> Outcome:
    """Run once, with fresh gradients where the problem has a backward."""
    problem.clear()
    with torch.set_grad_enabled(problem.backward):
        return run()


def multiplication(operands: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Return a function that computes X Wᵀ of each (N, H) and (V, H) in turn, in parts where it is huge."""
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


def loss_of(problem: Problem, values: Tensor) -> Tensor:
    """Compute the loss () of the targets' log-probabilities (N,), or of divergences (N,)."""
    if problem.loss == LOGPROB:  # REINFORCE, and the gradient of GRPO exactly on-policy
        return -(problem.advantages * values).mean()
    if problem.loss == GRPO:  # DeepSeekMath, arXiv 2402.03300, eq. 3 and 4; sequences have one length
        ratio = (values - problem.old_logprobs).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        surrogate = torch.minimum(ratio * problem.advantages, clipped * problem.advantages)
        away = problem.ref_logprobs - values
        return (KL_BETA * (torch.expm1(away) - away) - surrogate).mean()
    if problem.loss == DPO:  # arXiv 2305.18290, eq. 7: pair i is sequence i, chosen, and i + S/2, rejected
        # The reference's sums are equal for both of a pair and cancel: Liger's fused loss takes none.
        chosen, rejected = values.view(2, problem.sequences // 2, -1).sum(2)
        return -logsigmoid(DPO_BETA * (chosen - rejected)).mean()
    return values.mean() if problem.loss == KL else -values.mean()
