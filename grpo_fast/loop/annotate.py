"""Columns of a table that a forward without gradients gives: log-probabilities and entropies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_fast.data.table import CompletionTable
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.head import HeadOutput, HeadParameters, linear_logprob
from grpo_fast.loop.context import CONTEXT, places_in, seen_by_teacher
from grpo_fast.policy import PackedBatch, Policy
from grpo_fast.policy.out_of_memory import MicroBatchBudget
from grpo_fast.policy.packing import empty_batch, laid_out, units_of
from grpo_fast.rollout.agreement import evaluation_mode


@dataclass(frozen=True)
class ReferenceStates:
    """What the reference's distributions at N targets follow from."""

    hidden: Tensor  # (N, H) of the reference
    head: HeadParameters | None = None  # None: the policy's own, which is frozen

    def operands(self, own: HeadParameters) -> dict[str, Any]:
        """Return what a loss forms the reference's logits of.

        Args:
            own: the policy's head.
        """
        head = self.head or own
        return {"ref_hidden": self.hidden, "ref_weight": head.weight, "ref_bias": head.bias}

    def scaling(self, own: HeadParameters) -> dict[str, Any]:
        """Return what `linear_kl` does to these logits."""
        head = self.head or own
        return {"ref_logit_scale": head.logit_scale, "ref_softcap": head.softcap}


class Annotator:
    """Passes over a table in micro-batches that fit, again and again in smaller ones until the memory holds
    them.

    Args:
        micro_batch_tokens: input tokens of a micro-batch, while the memory holds them.
        temperature: of the distribution that log-probabilities are of.
        whole_groups: completions that are compared with one another are in one micro-batch.
        ready: waits for the reference's weights, where they were away.
        world: the ranks that compute together, each its own table.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        micro_batch_tokens: int,
        temperature: float = 1.0,
        whole_groups: bool = False,
        ready: Callable[[], None] = lambda: None,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.policy = policy
        self.configured = micro_batch_tokens
        self.temperature = temperature
        self.world = world
        remedy = "shorten the longest completions of the data"
        self.budget = MicroBatchBudget(unit="", remedy=remedy, repeats=not policy.sharded)
        self.keep_groups(whole_groups)
        self._ready = ready
        self.follows_policy = False  # whether the reference is the policy as it is now

    def keep_groups(self, whole: bool) -> None:
        """Keep each group in one micro-batch from here on, or split groups where that fits better."""
        self.whole_groups = whole
        self.budget.unit = "one group with its prompts" if whole else "one completion with its prompt"

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch now."""
        return self.budget.tokens(self.configured)

    def attempts(
        self, table: CompletionTable
    ) -> Iterator[tuple[AbstractContextManager[None], tuple[PackedBatch, ...]]]:
        """`MicroBatchBudget.attempts` with the table's micro-batches of each attempt."""

        def cut() -> tuple[tuple[PackedBatch, ...], int, int]:
            batches = self.packed(table)
            return batches, batches[0].input_ids.numel(), self._longest(table)

        return self.budget.attempts(cut)

    def packed(self, table: CompletionTable) -> tuple[PackedBatch, ...]:
        """Micro-batches of today's budget with the table's columns: one at least, and as many on every rank
        where a forward is one of all ranks."""
        key = (self.micro_batch_tokens, self.whole_groups, self.policy.packs)
        if key not in table.layouts:
            device = self.policy.device
            batches = []
            if len(table):
                batches = laid_out(
                    table, max_tokens=key[0], device=device, whole_groups=key[1], shares_prompts=key[2]
                )
            count = max(1, len(batches))
            if self.policy.sharded:
                count = max(self.world.gather_from_all("the micro-batches", lambda: count))
            if count > len(batches):
                batches += [empty_batch(table, device)] * (count - len(batches))
            table.layouts[key] = batches
        return tuple(batch.with_columns(table) for batch in table.layouts[key])

    def _longest(self, table: CompletionTable) -> int:
        """Input tokens of what is never split."""
        if not len(table):
            return 1
        if self.whole_groups:
            return max(units_of(table, 0, self.policy.packs, whole_groups=True)[1])
        return int((table.prompt_lengths + table.lengths - 1).max())

    @torch.no_grad()
    def columns(
        self,
        table: CompletionTable,
        *outputs: str,
        of: Callable[[], AbstractContextManager[Policy]] | None = None,
    ) -> list[Tensor]:
        """(N,) float32 of each head output, by default the log-probabilities; 0 for what the model did not
        write. LoRA's dropout is off, as in the engine.

        Args:
            outputs: of `linear_logprob`.
            of: makes the model current that is asked, the reference say; none: the policy.
        """
        names, device = outputs or ("logprob",), self.policy.device
        for attempt, batches in self.attempts(table):
            with (
                attempt,
                evaluation_mode(self.policy.model),
                of() if of else nullcontext(self.policy) as policy,
            ):
                found = [torch.zeros(len(table.token_ids), device=device) for _ in names]
                for batch in batches:
                    out = self.head_outputs(policy, batch, *names)
                    for name, column in zip(names, found, strict=True):
                        column[batch.token_index] = getattr(out, name).float()
        return found

    def reference_logprobs(self, table: CompletionTable) -> Tensor:
        """(N,) float32 under the policy as it was loaded."""
        self._ready()
        return self.columns(table, of=self.policy.reference)[0]

    @torch.no_grad()
    def reference_states(self, batch: PackedBatch, table: CompletionTable) -> ReferenceStates:
        """Return what an exact KL of the batch's targets reads of the reference. No logits are formed.

        Args:
            table: that the batch is of; with the object `context`, the reference sees that prompt.
        """
        self._ready()
        follows = nullcontext(self.policy) if self.follows_policy else self.policy.reference()
        with follows as reference, evaluation_mode(reference.model):

            def work() -> ReferenceStates:
                if CONTEXT in table.objects:
                    hidden = self._states_in_context(reference, batch, table)
                else:
                    hidden = reference.hidden_states(batch)
                if reference is self.policy:
                    return ReferenceStates(hidden)
                head = reference.head
                # What is gathered here is gone when the policy computes.
                return ReferenceStates(
                    hidden, replace(head, weight=head.weight.clone()) if reference.sharded else head
                )

            return reference.run(work)

    def _states_in_context(self, reference: Policy, batch: PackedBatch, table: CompletionTable) -> Tensor:
        """(N, H) for the batch's targets after the teacher's prompts, in micro-batches of their own."""
        rows = batch.rows.cpu()
        seen, device = seen_by_teacher(table, rows), reference.device
        shares = {"shares_prompts": reference.packs}
        batches = laid_out(seen, max_tokens=self.micro_batch_tokens, device=device, **shares)
        found = torch.cat([reference.hidden_states(one) for one in batches])
        order = torch.cat([one.token_index for one in batches]).argsort()
        targets = seen.mask.cumsum(0).sub(1)[places_in(seen, table, rows, batch)]
        return found[order[targets.to(device)]]

    def head_outputs(self, policy: Policy, batch: PackedBatch, *outputs: str) -> HeadOutput:
        """(N,) float32 log-probabilities at the sampling temperature, and `outputs` besides."""
        names = tuple(dict.fromkeys(("logprob", *outputs)))

        def work() -> HeadOutput:
            hidden, head = policy.hidden_states(batch), policy.head
            return linear_logprob(
                hidden,
                head.weight,
                batch.targets,
                temperature=self.temperature,
                outputs=names,
                **head.options,
            )

        return policy.run(work)
