"""Random batches in float64: padded completions, as papers and other trainers lay them out, and pairs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from grpo_fast.objective import LossInputs, StepTotals
from grpo_fast.objective.pairs import PreferenceInputs


@dataclass
class PaddedBatch:
    """B completions padded to T tokens, float64."""

    logprobs: Tensor  # (B, T), a leaf that requires grad
    old: Tensor  # (B, T)
    ref: Tensor  # (B, T)
    sampler: Tensor  # (B, T)
    entropy: Tensor  # (B, T), a leaf that requires grad
    advantages: Tensor  # (B,)
    mask: Tensor  # (B, T) bool: False on padding, and on a few tokens within completions
    lengths: list[int]
    group_size: int

    def inputs(self, rows=None, totals=None):
        """The packed batch of the given completions, in the given order."""
        rows = list(range(len(self.lengths))) if rows is None else rows

        def pack(values):
            return torch.cat([values[row, : self.lengths[row]] for row in rows])

        lengths = torch.tensor([self.lengths[row] for row in rows])
        sequence_ids = torch.arange(len(rows)).repeat_interleave(lengths)
        return LossInputs(
            logprobs=pack(self.logprobs),
            advantages=self.advantages[torch.tensor(rows)][sequence_ids],
            sequence_ids=sequence_ids,
            loss_mask=pack(self.mask),
            num_sequences=len(rows),
            old_logprobs=pack(self.old),
            ref_logprobs=pack(self.ref),
            sampler_logprobs=pack(self.sampler),
            entropy=pack(self.entropy),
            group_ids=torch.tensor(rows)[sequence_ids] // self.group_size,
            totals=totals,
        )

    @property
    def totals(self):
        return StepTotals(num_tokens=float(self.mask.sum()), num_sequences=float(len(self.lengths)))


@pytest.fixture
def make_batch(rng):
    """`make_batch(spread=..., empty=...)`: ratios within e^±spread; `empty`: one completion is masked out."""

    def make(spread=6.9, empty=False):
        def integer(low, high):
            return int(torch.randint(low, high + 1, (), generator=rng))

        def uniform(*shape):
            return torch.rand(*shape, generator=rng, dtype=torch.float64)

        group_size = integer(2, 4)
        lengths = [integer(1, 9) for _ in range(group_size * integer(2, 3))]
        shape = (len(lengths), max(lengths))
        log_ratio = (2 * uniform(*shape) - 1) * spread
        top = -3 * uniform(*shape) - 0.01  # both policies' log-probabilities stay negative
        logprobs = top + log_ratio.clamp(max=0)
        mask = uniform(*shape) > 0.2
        mask[:, 0] = True
        mask &= torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
        if empty:
            mask[integer(0, len(lengths) - 1)] = False
        advantages = torch.randn(len(lengths), generator=rng, dtype=torch.float64)
        advantages[integer(0, len(lengths) - 1)] = 0.0
        return PaddedBatch(
            logprobs=logprobs.requires_grad_(),
            old=(top - log_ratio.clamp(min=0)),
            ref=(logprobs.detach() + 0.5 * (2 * uniform(*shape) - 1)).clamp(max=0),
            sampler=(top - log_ratio.clamp(min=0) + 0.3 * (2 * uniform(*shape) - 1)).clamp(max=0),
            # Exact in float32, in which TRL cuts by entropy.
            entropy=(3 * uniform(*shape)).float().double().requires_grad_(),
            advantages=advantages,
            mask=mask,
            lengths=lengths,
            group_size=group_size,
        )

    return make


@pytest.fixture
def assert_same():
    """`assert_same(inputs, our_loss, their_loss)`: equal losses and gradients in every leaf of the inputs."""

    def same(inputs, ours, theirs, rtol=1e-9):
        leaves = [value for value in vars(inputs).values() if getattr(value, "requires_grad", False)]

        def gradients(loss):
            found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
            return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]

        our_gradients, their_gradients = gradients(ours), gradients(theirs)
        # A loss sums terms of both signs, each about as large as its gradient: errors are of their size.
        terms = sum(gradient.abs().sum().item() for gradient in their_gradients)
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=rtol, atol=1e-12 + rtol * terms)
        for mine, other in zip(our_gradients, their_gradients, strict=True):
            torch.testing.assert_close(mine, other.to(mine), rtol=rtol, atol=rtol * other.abs().max().item())

    return same


@pytest.fixture
def make_pairs(rng):
    """Pairs (seven) of completions of 1 to 40 tokens, about a nat a token, log-ratios of a few nats."""

    def make(num_chosen=7, num_rejected=None, **changes):
        num_rejected = num_chosen if num_rejected is None else num_rejected

        def lengths(n):
            return torch.randint(1, 41, (n,), generator=rng).double()

        def logprobs(of):
            return -of * (0.05 + torch.rand(len(of), generator=rng, dtype=torch.float64))

        def noise(n):
            return 3 * torch.randn(n, generator=rng, dtype=torch.float64)

        inputs = {}
        for name, n in (("chosen", num_chosen), ("rejected", num_rejected)):
            inputs[f"{name}_lengths"] = of = lengths(n)
            inputs[f"{name}_logprobs"] = own = logprobs(of)
            inputs[f"ref_{name}_logprobs"] = own + noise(n)
            own.requires_grad_()
        return PreferenceInputs(**(inputs | changes))

    return make
