"""What the head is measured on: one setting, the tensors of one batch in it, and the losses it can end in.

The losses are defined once, for the peers and the oracle, in plain torch, so that no peer pays for the
metrics of our own. A batch is S equally long sequences.
"""

from __future__ import annotations

from collections.abc import Callable
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
PRODUCT = "one product X Wᵀ"


@dataclass(frozen=True)
class Setting:
    """One shape of the head, in which all implementations are measured together."""

    rows: str  # "flat", "peaked", "real" (a model's own), "histogram" (made to match a model's live tiles)
    tokens: int  # N
    hidden: int  # H
    vocabulary: int  # V
    mode: str  # one of MODES
    trainable: bool  # whether the head's weight takes a gradient
    dtype: str  # a key of DTYPES
    loss: str = LOGPROB  # one of LOSSES

    @property
    def product_flops(self) -> float:
        """Of one X Wᵀ."""
        return 2.0 * self.tokens * self.hidden * self.vocabulary

    @property
    def flops(self) -> float:
        """Of a dense computation that keeps its logits: one product forward, one per gradient."""
        return (1 if self.mode == FORWARD else 2 + self.trainable) * self.product_flops

    @property
    def least_bytes(self) -> float:
        """Inputs read once and results written once: what no implementation of the head avoids."""
        size = DTYPES[self.dtype].itemsize
        hidden, weight = self.tokens * self.hidden * size, self.vocabulary * self.hidden * size
        gradients = 0 if self.mode == FORWARD else hidden + self.trainable * weight
        return hidden + weight + gradients + (8 + 4) * self.tokens  # targets in, log-probabilities out

    def rates(self, seconds: float) -> dict[str, float]:
        """Of an implementation that takes so long, were it dense: leaving work out raises them."""
        return {"flops_per_second": self.flops / seconds, "bytes_per_second": self.least_bytes / seconds}


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
        """The shared end of implementations that give log-probabilities (N,): their loss and its gradient."""
        logprobs = logprobs.reshape(-1)
        return self.finish_loss(loss_of(self, logprobs), logprobs)

    def finish_loss(self, loss: Tensor, logprobs: Tensor | None = None) -> Outcome:
        """The end of those that compute the loss () themselves."""
        if self.backward:
            loss.backward()
        return Outcome(None if logprobs is None else logprobs.detach(), loss=loss.detach())

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    @property
    def output_bytes(self) -> int:
        """Log-probabilities and the gradients asked for: what no implementation can avoid."""
        gradients = [t for t in (self.hidden, self.weight) if t.requires_grad]
        return 4 * self.targets.numel() + sum(t.nbytes for t in gradients)


@dataclass(frozen=True)
class Outcome:
    """What one run hands back; gradients lie in the problem's `.grad`."""

    logprobs: Tensor | None = None  # (N,) detached; None where an implementation keeps them to itself
    certificate: dict[str, Tensor] | None = None  # scalars on the device
    loss: Tensor | None = None  # () detached; None where it is another number with the same gradient


Run = Callable[[], Outcome]


def loss_of(problem: Problem, logprobs: Tensor) -> Tensor:
    """The problem's loss () of the targets' log-probabilities (N,)."""
    if problem.loss == LOGPROB:  # REINFORCE, and the gradient of GRPO exactly on-policy
        return -(problem.advantages * logprobs).mean()
    if problem.loss == GRPO:
        return _grpo(problem, logprobs)
    if problem.loss == DPO:
        return _dpo(problem, logprobs)
    return -logprobs.mean()


def _grpo(problem: Problem, logprobs: Tensor) -> Tensor:
    """DeepSeekMath, arXiv 2402.03300, eq. 3 and 4; sequences of one length make its means one over tokens."""
    ratio = (logprobs - problem.old_logprobs).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.minimum(ratio * problem.advantages, clipped * problem.advantages)
    away = problem.ref_logprobs - logprobs
    return (KL_BETA * (torch.expm1(away) - away) - surrogate).mean()


def _dpo(problem: Problem, logprobs: Tensor) -> Tensor:
    """DPO, arXiv 2305.18290, eq. 7. Pair i is sequence i, chosen, and i + S/2, rejected.

    The reference's sums are the same for both of a pair, so that they cancel: Liger's fused loss takes none.
    """
    chosen, rejected = logprobs.view(2, problem.sequences // 2, -1).sum(2)
    return -logsigmoid(DPO_BETA * (chosen - rejected)).mean()
