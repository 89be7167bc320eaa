"""What is measured: one setting, and the tensors of one batch in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .losses import LOGPROB, NAMES, loss_of

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"
MODES = (FORWARD_BACKWARD, FORWARD)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Setting:
    """One cell of the benchmark: all implementations are measured in it together."""

    rows: str  # "flat", "peaked", "real" (a model's own), "histogram" (made to match a model's live tiles)
    tokens: int  # N
    hidden: int  # H
    vocabulary: int  # V
    mode: str  # one of MODES
    trainable: bool  # whether the head's weight takes a gradient
    dtype: str  # a key of DTYPES
    loss: str = LOGPROB  # one of LOSSES

    @property
    def title(self) -> str:
        head = "" if self.mode == FORWARD else ", trainable head" if self.trainable else ", frozen head"
        return (
            f"{NAMES[self.loss]}, {self.mode.replace('_', ' + ')}{head}, {self.rows} rows, "
            f"N {self.tokens:,}, H {self.hidden:,}, V {self.vocabulary:,}, {self.dtype}"
        )

    @property
    def flops(self) -> float:
        """Of a dense computation that keeps its logits: one product forward, one per gradient."""
        products = 1 if self.mode == FORWARD else 2 + self.trainable
        return 2.0 * products * self.tokens * self.hidden * self.vocabulary


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
    def input_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.hidden, self.weight, self.targets))

    @property
    def output_bytes(self) -> int:
        """Log-probabilities and the gradients asked for: what no implementation can avoid."""
        gradients = [t for t in (self.hidden, self.weight) if t.requires_grad]
        return 4 * self.targets.numel() + sum(t.numel() * t.element_size() for t in gradients)


@dataclass(frozen=True)
class Outcome:
    """What one run hands back; gradients lie in the problem's `.grad`."""

    logprobs: Tensor | None = None  # (N,) detached; None where an implementation keeps them to itself
    certificate: dict[str, Tensor] | None = None  # scalars on the device
    loss: Tensor | None = None  # () detached; None where it is another number with the same gradient


Run = Callable[[], Outcome]
