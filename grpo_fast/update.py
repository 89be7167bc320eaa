"""Optimiser steps in micro-batches that fit: out of memory, a step is done again in smaller ones.

The losses of micro-batches add up to the step's because they are divided by the counts of the whole step,
so a smaller micro-batch changes the memory and not the update. The update itself is never done again: it may
have changed some weights and not others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_fast.objective.types import StepTotals
from grpo_fast.policy.optimizer import PolicyOptimizer
from grpo_fast.policy.out_of_memory import is_out_of_memory, release_memory
from grpo_fast.policy.packing import PackedBatch, Sample, pack
from grpo_fast.policy.policy import Policy
from grpo_fast.run_record.checkpoint import capture_rng, restore_rng

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    groups: list[Any]  # `experience.Group`
    metrics: dict[str, float]
    timings: dict[str, float]


@dataclass(frozen=True)
class Minibatch:
    """The samples of one optimiser step, and the micro-batches they are laid out in."""

    samples: tuple[Sample, ...]
    totals: StepTotals
    batches: tuple[PackedBatch, ...]
    max_tokens: int  # the budget they were laid out within

    def with_logprobs(self, name: str, values: Sequence[Tensor]) -> Minibatch:
        """`old_logprobs` or `ref_logprobs` set to these, (N,) for each micro-batch."""
        pairs = zip(self.batches, values, strict=True)
        return replace(self, batches=tuple(replace(batch, **{name: value}) for batch, value in pairs))

    def laid_out(self, batches: Sequence[PackedBatch], max_tokens: int) -> Minibatch:
        """The same samples in other micro-batches; log-probabilities that are known move along."""
        moved = replace(self, batches=tuple(batches), max_tokens=max_tokens)
        for name in ("old_logprobs", "ref_logprobs"):
            if getattr(self.batches[0], name) is not None:
                known = self._by_sample(name)
                values = [torch.cat([known[i] for i in batch.sample_ids.tolist()]) for batch in batches]
                moved = moved.with_logprobs(name, values)
        return moved

    def _by_sample(self, name: str) -> dict[int, Tensor]:
        """(C,) for each sample; a sequence's tokens are contiguous in its micro-batch."""
        known = {}
        for batch in self.batches:
            ids = batch.sample_ids.tolist()
            lengths = [len(self.samples[i].completion_ids) for i in ids]
            known |= dict(zip(ids, getattr(batch, name).split(lengths), strict=True))
        return known


class TokenBudget:
    """The tokens of a micro-batch, which halve when the memory does not hold them.

    `limit` is what an out-of-memory error has left of the configured budget; None: all of it. A resumed run
    sets it again.

    Args:
        whole: what is never split, for messages.
        shorter: how it becomes smaller.
    """

    def __init__(self, *, whole: str, shorter: str) -> None:
        self._whole = whole
        self._shorter = shorter
        self.limit: int | None = None

    def budget(self, configured: int) -> int:
        """Tokens of a micro-batch now."""
        return configured if self.limit is None else min(configured, self.limit)

    def until_it_fits(self, attempt: Callable[[], T], sizes: Callable[[], tuple[int, int]]) -> T:
        """What `attempt` returns, within a smaller budget each time that the memory runs out.

        Every attempt starts from the same random state; whatever else one that failed has changed, the next
        must set back first.

        Args:
            sizes: tokens of the attempt's largest micro-batch, and of the largest thing that is never split.

        Raises:
            torch.OutOfMemoryError: not even that fits.
        """
        random_state = capture_rng()
        while True:
            try:
                return attempt()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._shrink(*sizes(), error)
            # Out of the except clause nothing holds on to the activations of the attempt that failed.
            release_memory()
            restore_rng(*random_state)

    def _shrink(self, largest: int, longest: int, error: RuntimeError) -> None:
        """Half of the largest micro-batch, but not less than what is never split."""
        if largest <= longest:
            raise torch.OutOfMemoryError(
                f"out of memory in a micro-batch of {largest} tokens, which is {self._whole}: "
                "micro_batch_tokens cannot be lowered further. Set model.gradient_checkpointing = true, "
                f"{self._shorter}, train adapters (model.lora), or freeze the head "
                f"(model.train_lm_head = false). The allocator said: {error}"
            ) from error
        self.limit = max(largest // 2, longest)
        logger.warning(
            "out of memory in a micro-batch of %d tokens: this is done again, and the run goes on, with "
            "micro_batch_tokens = %d; the global batch stays as it is",
            largest,
            self.limit,
        )


class MicroBatches(TokenBudget):
    """Lays samples out within a budget of tokens."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(
            whole="one completion with its prompt", shorter="lower rollout.max_completion_length"
        )
        self.policy = policy

    def pack(self, samples: Sequence[Sample], configured: int) -> list[PackedBatch]:
        return pack(
            samples,
            max_tokens=self.budget(configured),
            share_prompts=self.policy.shares_prompts,
            device=self.policy.device,
        )

    def minibatch(self, samples: Sequence[Sample], totals: StepTotals, configured: int) -> Minibatch:
        batches = tuple(self.pack(samples, configured))
        return Minibatch(tuple(samples), totals, batches, self.budget(configured))

    def split(
        self, samples: Sequence[Sample], totals: StepTotals, parts: int, configured: int
    ) -> list[Minibatch]:
        """Minibatches of whole groups, each with its share of the counts; metrics count its own samples."""
        groups = sorted({sample.group_id for sample in samples})
        parts = min(parts, len(groups))
        part_of = {group_id: i % parts for i, group_id in enumerate(groups)}
        members = [[s for s in samples if part_of[s.group_id] == part] for part in range(parts)]
        return [
            self.minibatch(
                part,
                StepTotals(
                    num_tokens=totals.num_tokens / parts,
                    num_sequences=totals.num_sequences / parts,
                    measured_tokens=sum(len(sample.completion_ids) for sample in part),
                    measured_sequences=len(part),
                ),
                configured,
            )
            for part in members
        ]

    def fit(self, minibatch: Minibatch, work: Callable[[Minibatch], T]) -> T:
        """What `work` makes of the minibatch, in micro-batches small enough for the memory.

        After an out-of-memory error it starts anew: see `until_it_fits`.

        Raises:
            torch.OutOfMemoryError: not even the longest completion alone fits.
        """

        def attempt() -> T:
            nonlocal minibatch
            if self.limit is not None and self.limit < minibatch.max_tokens:
                minibatch = minibatch.laid_out(self.pack(minibatch.samples, self.limit), self.limit)
            return work(minibatch)

        longest = max(len(s.prompt_ids) + len(s.completion_ids) - 1 for s in minibatch.samples)
        return self.until_it_fits(attempt, lambda: (tokens_of(minibatch.batches[0]), longest))


def optimizer_step(optimizer: PolicyOptimizer) -> float:
    """`optimizer.step()`; smaller micro-batches are no help where this does not fit.

    Raises:
        torch.OutOfMemoryError: says what is. Unless `optimizer.mid_step` the weights are as before.
    """
    try:
        return optimizer.step()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            "out of memory in the optimizer's step, where smaller micro-batches do not help: Adam's moments "
            "take 8 bytes for each trained parameter. Train adapters (model.lora), or freeze the head "
            "(model.train_lm_head = false); `grpo-fast plan` lists what else makes room. The allocator said: "
            f"{error}"
        ) from error


def tokens_of(batch: PackedBatch) -> int:
    return batch.input_ids.numel()


def sum_metrics(shares: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Micro-batches' shares of a step: they add up, but for extremes."""
    combined = {}
    for name in {name: None for share in shares for name in share}:
        values = torch.stack([share[name].float().cpu() for share in shares if name in share])
        if name.endswith("_max"):
            combined[name] = values.max().item()
        elif name.endswith("_min"):
            combined[name] = values.min().item()
        else:
            combined[name] = values.sum().item()
    return combined


def mean_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over the optimiser steps of one rollout."""
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
