"""Train on fixed completions: preference pairs, labelled completions and ranked groups.

A step samples groups from a table, and the loss compares the log-probabilities of whole completions. Those of
the reference are computed before the first step, so that its model is not in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_fast.config.preference import BetaConfig
from grpo_fast.config.section import plural
from grpo_fast.data import PromptSampler
from grpo_fast.data.table import CompletionTable
from grpo_fast.head import linear_logprob
from grpo_fast.loop.algorithm import Algorithm
from grpo_fast.loop.annotate import Annotator
from grpo_fast.objective.metrics import sum_metrics
from grpo_fast.objective.pairs import kto_reference_point, preference_loss
from grpo_fast.objective.ranking import ranking_loss
from grpo_fast.objective.types import LossOutputs, present
from grpo_fast.policy import PackedBatch, PolicyOptimizer
from grpo_fast.policy.host_memory import bytes_in_use
from grpo_fast.policy.out_of_memory import optimizer_step
from grpo_fast.preference.comparison import (
    preference_inputs,
    preference_totals,
    ranked_inputs,
    summed_logprobs,
)
from grpo_fast.preference.evaluation import RankingEvaluation
from grpo_fast.record.logs import Clock
from grpo_fast.rollout.sampling import derive_seed

if TYPE_CHECKING:
    from grpo_fast.config.schema import TrainConfig

StepLoss = Callable[[CompletionTable, Tensor], LossOutputs]
"""Maps groups of a step and the log-probabilities (S,) of their completions to their share of the loss."""


class PreferenceTrainer(Algorithm):
    """Training on pairs, labelled completions or ranked groups.

    Args:
        annotator: keeps the completions of a prompt in one micro-batch.
        prompts: samples what a step compares.
        comparisons: a group for each prompt, in the order of the prompts' dataset.
        mismatched: for KTO, each prompt with another prompt's completion.
        held_out: groups for evaluation, each with an order to agree with.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        annotator: Annotator,
        optimizer: PolicyOptimizer,
        prompts: PromptSampler,
        comparisons: CompletionTable,
        mismatched: CompletionTable | None = None,
        held_out: CompletionTable | None = None,
    ) -> None:
        super().__init__(annotator.policy, optimizer, annotator, prompts)
        self.config, self.preference = config, config.preference
        self.comparisons = comparisons
        self.mismatched = mismatched
        self.compared = held_out
        self.held_out = range(0 if held_out is None else held_out.num_groups)
        self.groups = {prompt.index: number for number, prompt in enumerate(prompts.dataset)}
        self.drawn: list[int] = []  # the groups of the step
        self.ranks = config.algorithm == "rank"  # ranked groups rather than pairs or labelled completions
        beta = present(self.preference.loss.beta)
        self.beta = BetaController(beta, self.preference.beta, total_steps=config.max_steps)

    def described(self) -> dict[str, str]:
        kind = "ranked group" if self.ranks else "comparison"
        return {"groups": f"{plural(self.config.prompts_per_step, kind)} a step"}

    def collect(self, clock: Clock) -> tuple[CompletionTable, dict[str, float]]:
        self.drawn = [self.groups[prompt.index] for prompt in self.prompts.next()]
        return self.comparisons.select_groups(self.drawn), {}

    def learn(self, table: CompletionTable, clock: Clock) -> dict[str, float]:
        beta = self.beta.value(self.step)
        with clock("logprobs"):
            loss = self.step_loss(table, beta)
        with clock("update"):
            for attempt, batches in self.annotator.attempts(table):
                with attempt:
                    shares, learns = self.gradient(table, loss, batches)
            metrics = sum_metrics(shares)
            metrics |= {"learning_rate": self.optimizer.learning_rate, "update/skipped": float(not learns)}
            if learns:
                metrics["grad_norm"] = optimizer_step(self.optimizer)
        if not self.ranks:
            metrics["beta"] = beta
            self.beta.observe(metrics["rewards/margins"])
        return metrics

    def step_loss(self, table: CompletionTable, beta: float) -> StepLoss:
        """Return the loss of a step, with its counts, its beta and, for KTO, its reference point."""
        if self.ranks:
            config, total = self.preference.ranking, table.num_groups
            return lambda some, logprobs: ranking_loss(ranked_inputs(some, logprobs, total), config)
        loss, totals, kl = replace(self.preference.loss, beta=beta), preference_totals(table), None
        if not loss.paired:
            others = present(self.mismatched).select_groups(self.drawn)
            now = summed_logprobs(others, self.annotator)
            kl = kto_reference_point(now, others.facts["ref_logprob"]).to(self.policy.device)
        return lambda some, logprobs: preference_loss(preference_inputs(some, logprobs, totals, kl), loss)

    def gradient(
        self, table: CompletionTable, loss: StepLoss, batches: Sequence[PackedBatch]
    ) -> tuple[list[dict[str, Tensor]], bool]:
        """Run backward over every micro-batch.

        Returns:
            Their shares of the metrics, and whether any has a gradient: groups that are all ties have none.
        """
        self.optimizer.zero_grad()  # of a failed attempt
        shares, learns = [], False
        for number, batch in enumerate(batches):
            seed = derive_seed(self.config.seed, self.step, number)
            out = loss(table.select(batch.rows.sort().values), self.logprobs(batch, seed))
            if out.loss.requires_grad:
                out.loss.backward()
                learns = True
            shares.append(out.metrics | {"loss": out.loss.detach()})
        return shares, learns

    def logprobs(self, batch: PackedBatch, seed: int) -> Tensor:
        """Return the (S,) log-probability of each completion in table order, differentiable."""
        head = self.policy.head
        weight_grad = self.optimizer.gradient_of(head.weight)
        tokens = linear_logprob(
            self.policy.hidden_states(batch),
            head.weight if weight_grad is None else head.weight.detach(),
            batch.targets,
            weight_grad=weight_grad,
            seed=seed,
            **head.options,
        ).logprob
        summed = tokens.new_zeros(batch.num_sequences).index_add(0, batch.sequence_ids, tokens)
        return summed[batch.rows.argsort()]

    def timings(self, table: CompletionTable, seconds: float) -> dict[str, float]:
        tokens = int(table.lengths.sum() + table.prompt_offsets.diff()[table.prompts.unique()].sum())
        peak = bytes_in_use(self.policy.device)
        return {"tokens_per_second": tokens / seconds, "memory/peak_bytes": peak}

    def evaluate(self, size: int | None = None) -> RankingEvaluation:
        """Compare the order of the log-probabilities of held-out completions with that of their grades."""
        table = present(self.compared).select_groups(self.held_out[:size])
        logprobs = summed_logprobs(table, self.annotator)
        config = self.preference.ranking if self.ranks else self.preference.loss
        return RankingEvaluation(table, logprobs, config.averaged)

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts.state_dict(),
            "beta": self.beta.state_dict(),
            "micro_batch_limit": self.annotator.budget.limit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prompts.load_state_dict(state["prompts"])
        self.beta.load_state_dict(state["beta"])
        self.annotator.budget.limit = state["micro_batch_limit"]


class BetaController:
    """The beta of each step, with a state that resumes exactly.

    The schedule leads from `start` at the first step to `config.final` at the last. With `band`, beta rises
    or falls by a share while the reward gap of the step before is outside the band.
    """

    def __init__(self, start: float, config: BetaConfig, *, total_steps: int) -> None:
        self._start, self._config, self._total_steps = start, config, total_steps
        self._factor = 1.0  # of `start`, by the band

    def value(self, step: int) -> float:
        """Return the beta of the step with this index, from 0."""
        config, beta = self._config, self._start * self._factor
        if config.final is not None:
            progress = min(1.0, step / max(1, self._total_steps - 1))
            if config.schedule == "cosine":
                progress = 0.5 * (1.0 - math.cos(math.pi * progress))
            beta += (config.final - beta) * progress
        return max(config.min or 0.0, min(beta, config.max or math.inf))

    def observe(self, gap: float) -> None:
        """Move beta by a finished step's reward gap, `rewards/margins`."""
        if (band := self._config.band) is not None:
            low, high = (present(bound) / self._start for bound in (self._config.min, self._config.max))
            self._factor = band.moved(self._factor, gap, low, high)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self._factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._factor = state["factor"]
