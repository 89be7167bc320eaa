"""Compute log-probabilities, entropies and reference states of a table without gradients."""

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
    """Hidden states and head that give the reference's logits at N targets."""

    hidden: Tensor  # (N, H)
    head: HeadParameters | None = None  # None: the policy's head

    def operands(self, policy_head: HeadParameters) -> dict[str, Any]:
        head = self.head or policy_head
        return {"ref_hidden": self.hidden, "ref_weight": head.weight, "ref_bias": head.bias}

    def scaling(self, policy_head: HeadParameters) -> dict[str, Any]:
        head = self.head or policy_head
        return {"ref_logit_scale": head.logit_scale, "ref_softcap": head.softcap}


class Annotator:
    """Passes over a table in micro-batches, which become smaller until they fit the memory.

    Args:
        micro_batch_tokens: input tokens of a micro-batch, if they fit.
        whole_groups: keep completions that share a baseline in one micro-batch.
        ready: waits for the reference's weights after an offload.
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
        self.follows_policy = False  # the reference is the current policy

    def keep_groups(self, whole: bool) -> None:
        self.whole_groups = whole
        self.budget.unit = "one group with its prompts" if whole else "one completion with its prompt"

    @property
    def micro_batch_tokens(self) -> int:
        """Input tokens of a micro-batch, lowered after running out of memory."""
        return self.budget.tokens(self.configured)

    def attempts(
        self, table: CompletionTable
    ) -> Iterator[tuple[AbstractContextManager[None], tuple[PackedBatch, ...]]]:
        """Yield each attempt of `MicroBatchBudget.attempts` with its micro-batches."""

        def cut() -> tuple[tuple[PackedBatch, ...], int, int]:
            batches = self.packed(table)
            return batches, batches[0].input_ids.numel(), self._longest(table)

        return self.budget.attempts(cut)

    def packed(self, table: CompletionTable) -> tuple[PackedBatch, ...]:
        """Return the micro-batches with the table's columns: at least one, equally many on sharded ranks."""
        key = (self.micro_batch_tokens, self.whole_groups, self.policy.packs)
        if key not in table.layouts:
            device, (tokens, whole, shares) = self.policy.device, key
            options: Any = {"max_tokens": tokens, "whole_groups": whole, "shares_prompts": shares}
            batches = laid_out(table, device=device, **options) if len(table) else []
            count = max(1, len(batches))
            if self.policy.sharded:
                count = max(self.world.gather_from_all("the micro-batches", lambda: count))
            missing = count - len(batches)
            table.layouts[key] = batches + ([empty_batch(table, device)] * missing if missing else [])
        return tuple(batch.with_columns(table) for batch in table.layouts[key])

    def _longest(self, table: CompletionTable) -> int:
        """Return the input tokens of the largest unit that is never split."""
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
        """Compute (N,) float32 head outputs without LoRA's dropout; tokens the model did not write have 0.

        Args:
            outputs: of `linear_logprob`; by default log-probabilities.
            of: a context of the model to use, such as the reference; by default the policy.
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
        """Compute the reference's log-probabilities, (N,) float32."""
        self._ready()
        return self.columns(table, of=self.policy.reference)[0]

    @torch.no_grad()
    def reference_states(self, batch: PackedBatch, table: CompletionTable) -> ReferenceStates:
        """Compute the reference's states at the batch's targets, after the table's `context` if any."""
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
                if reference.sharded:  # the gathered weight is freed after this
                    head = replace(head, weight=head.weight.clone())
                return ReferenceStates(hidden, head)

            return reference.run(work)

    def _states_in_context(self, reference: Policy, batch: PackedBatch, table: CompletionTable) -> Tensor:
        """Compute (N, H) states at the batch's targets after the teacher's prompts."""
        rows = batch.rows.cpu()
        seen, device = seen_by_teacher(table, rows), reference.device
        options: Any = {"max_tokens": self.micro_batch_tokens, "shares_prompts": reference.packs}
        batches = laid_out(seen, device=device, **options)
        states = torch.cat([reference.hidden_states(one) for one in batches])
        order = torch.cat([one.token_index for one in batches]).argsort()
        targets = seen.mask.cumsum(0).sub(1)[places_in(seen, table, rows, batch)]
        return states[order[targets.to(device)]]

    def head_outputs(self, policy: Policy, batch: PackedBatch, *outputs: str) -> HeadOutput:
        """Compute (N,) float32 log-probabilities at the sampling temperature, and further `outputs`."""
        names = tuple(dict.fromkeys(("logprob", *outputs)))

        def work() -> HeadOutput:
            hidden, head = policy.hidden_states(batch), policy.head
            options: Any = {"temperature": self.temperature, "outputs": names, **head.options}
            return linear_logprob(hidden, head.weight, batch.targets, **options)

        return policy.run(work)
