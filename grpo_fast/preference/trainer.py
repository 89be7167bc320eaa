"""Training on fixed completions of known worth: preferences and ranked groups.

Draw prompts with their completions, compute the policy's log-probability of each, let the loss compare them,
step. The reference's log-probabilities are known before the first step, so its model is not in memory, and
nothing is generated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_fast.data import PromptSampler
from grpo_fast.objective.metrics import sum_metrics
from grpo_fast.objective.pairs import (
    PreferenceLossConfig,
    PreferenceTotals,
    kto_reference_point,
    preference_loss,
)
from grpo_fast.objective.ranking import ranking_loss
from grpo_fast.objective.types import LossOutputs, present
from grpo_fast.policy import Policy, PolicyOptimizer
from grpo_fast.policy.out_of_memory import optimizer_step
from grpo_fast.preference.comparison import (
    Comparison,
    preference_inputs,
    preference_totals,
    ranked_inputs,
)
from grpo_fast.preference.config import BetaConfig, PreferenceConfig
from grpo_fast.preference.evaluation import GroupRanking, RankingEvaluation
from grpo_fast.preference.scoring import Request, RequestBatches, pack_requests, score, sequence_logprobs
from grpo_fast.run_record.logs import Clock, StepResult


@dataclass(frozen=True)
class StepConstants:
    """What all micro-batches of a step have in common."""

    loss: PreferenceLossConfig  # with the beta in force
    totals: PreferenceTotals
    num_comparisons: int
    kl: Tensor | None  # () KTO's reference point


class PreferenceTrainer:
    """A preference or ranking run: its state, its optimiser steps and its evaluation.

    Args:
        preference: the losses, and how beta moves.
        ranks: whether ranked groups are compared, instead of pairs or labelled completions.
        total_steps: optimiser steps of the whole run.
        micro_batch_tokens: tokens of a micro-batch, while the memory holds them.
        prompts: draws what a step compares.
        comparisons: the completions of each prompt, by its row.
        reference: log-probabilities of each comparison's `sequences`, by row; empty when the loss has no
            reference.
        held_out: comparisons for evaluation, each with an order to agree with.
    """

    def __init__(
        self,
        preference: PreferenceConfig,
        *,
        ranks: bool,
        total_steps: int,
        micro_batch_tokens: int,
        policy: Policy,
        optimizer: PolicyOptimizer,
        prompts: PromptSampler,
        comparisons: Mapping[int, Comparison],
        reference: Mapping[int, Tensor],
        held_out: Sequence[Comparison] = (),
    ) -> None:
        self.preference = preference
        self.policy = policy
        self.optimizer = optimizer
        self.prompts = prompts
        self.comparisons = comparisons
        self.reference = reference
        self.held_out = held_out
        self.batches = RequestBatches(policy, micro_batch_tokens)
        self.step = 0
        self.ranks = ranks
        self.beta = BetaController(present(preference.loss.beta), preference.beta, total_steps=total_steps)

    def train_step(self) -> StepResult:
        """One optimiser step."""
        clock = Clock()
        with clock("step"):
            comparisons = [self.comparisons[prompt.index] for prompt in self.prompts.next()]
            metrics = self.update(comparisons, clock)
        self.step += 1
        self.optimizer.advance()
        tokens = sum(request.num_tokens() for request in requests_of(comparisons))
        timings = {
            "tokens_per_second": tokens / clock.seconds["time/step"],
            "memory/micro_batch_tokens": self.batches.max_tokens,
        }
        return StepResult(metrics, clock.seconds | timings)

    def update(self, comparisons: Sequence[Comparison], clock: Clock) -> dict[str, float]:
        """The gradient of the step's comparisons in micro-batches that fit, then the step."""
        with clock("logprobs"):
            constants = self.constants(comparisons)
        with clock("update"):
            gradient = partial(self.gradient, comparisons, constants)
            shares, learns = self.batches.fit(requests_of(comparisons), gradient)
            learning_rate = self.optimizer.learning_rate
            metrics = sum_metrics(shares) | {
                "learning_rate": learning_rate,
                "update/skipped": float(not learns),
            }
            if learns:
                metrics["grad_norm"] = optimizer_step(self.optimizer)
        if not self.ranks:
            metrics["beta"] = beta = present(constants.loss.beta)
            self.beta.observe(metrics["rewards/margins"] / beta)
        return metrics

    def constants(self, comparisons: Sequence[Comparison]) -> StepConstants:
        """The beta in force, the step's counts, and for KTO the reference point of the whole step."""
        loss = replace(self.preference.loss, beta=self.beta.value(self.step))
        kl = None
        if not self.ranks and not loss.paired:
            requests = [Request(c.prompt.token_ids, (present(c.mismatched_ids),)) for c in comparisons]
            now = torch.cat(score(requests, self.batches))
            before = torch.stack([self.reference[c.prompt.index][-1] for c in comparisons])
            kl = kto_reference_point(now, before).to(self.policy.device)
        return StepConstants(loss, preference_totals(comparisons), len(comparisons), kl)

    def gradient(
        self, comparisons: Sequence[Comparison], constants: StepConstants, parts: Sequence[Sequence[int]]
    ) -> tuple[list[dict[str, Tensor]], bool]:
        """Backward through every micro-batch: their shares of the metrics, and whether any has a gradient.

        The losses of the micro-batches add up.
        """
        self.optimizer.zero_grad()  # of an attempt that failed
        chosen = [[comparisons[i] for i in part] for part in parts]
        if constants.loss.couples and len(parts) > 1 and not self.ranks:
            return self.backward_coupled(chosen, constants)
        results = [self.backward(part, constants) for part in chosen]
        return [metrics for metrics, _ in results], any(grad for _, grad in results)

    def logprobs(self, comparisons: Sequence[Comparison]) -> Tensor:
        """(S,) log-probability of every completion, with gradient where that is enabled."""
        weight = self.policy.head.weight
        weight_grad = self.optimizer.gradient_of(weight) if torch.is_grad_enabled() else None
        batch = pack_requests(requests_of(comparisons), self.policy)
        return sequence_logprobs(self.policy, batch, weight_grad)

    def loss(
        self, comparisons: Sequence[Comparison], logprobs: Tensor, constants: StepConstants
    ) -> LossOutputs:
        """These comparisons' share of the step's loss; `logprobs` (S,) are of their completions, in order."""
        reference = None
        if self.reference:
            parts = [self.reference[c.prompt.index][: len(c.completion_ids)] for c in comparisons]
            reference = torch.cat(parts).to(logprobs)
        if self.ranks:
            groups = ranked_inputs(comparisons, logprobs, reference, constants.num_comparisons)
            return ranking_loss(groups, self.preference.ranking)
        pairs = preference_inputs(comparisons, logprobs, reference, constants.totals, constants.kl)
        return preference_loss(pairs, constants.loss)

    def backward(
        self, comparisons: Sequence[Comparison], constants: StepConstants
    ) -> tuple[dict[str, Tensor], bool]:
        """One micro-batch's metrics, and whether it has a gradient: groups that are all ties have none."""
        out = self.loss(comparisons, self.logprobs(comparisons), constants)
        if out.loss.requires_grad:
            out.loss.backward()
        return out.metrics | {"loss": out.loss.detach()}, out.loss.requires_grad

    def backward_coupled(
        self, parts: Sequence[Sequence[Comparison]], constants: StepConstants
    ) -> tuple[list[dict[str, Tensor]], bool]:
        """For a loss that compares all pairs of the step, at the price of one forward more.

        Its gradient in the log-probabilities comes first, then each micro-batch's share of it (GradCache,
        arXiv 2101.06983).
        """
        with torch.no_grad():
            values = torch.cat([self.logprobs(part) for part in parts])
        leaves = values.requires_grad_()
        ordered = [comparison for part in parts for comparison in part]
        out = self.loss(ordered, leaves, constants)
        (gradient,) = torch.autograd.grad(out.loss, leaves)
        sizes = [sum(len(c.completion_ids) for c in part) for part in parts]
        for part, share in zip(parts, gradient.split(sizes), strict=True):
            (self.logprobs(part) * share).sum().backward()
        return [out.metrics | {"loss": out.loss.detach()}], True

    def evaluate(self, size: int | None = None) -> RankingEvaluation:
        """How log-probabilities order the held-out completions, or those of the first `size` prompts."""
        chosen = self.held_out[:size]
        scores = score(requests_of(chosen), self.batches)
        section = self.preference
        return RankingEvaluation(
            tuple(
                GroupRanking(c.grades, tuple(s.tolist()), tuple(map(len, c.completion_ids)), c.group_type)
                for c, s in zip(chosen, scores, strict=True)
            ),
            averaged=section.ranking.averaged if self.ranks else section.loss.averaged,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; what a resumed run needs besides the optimizer's tensors."""
        return {
            "prompts": self.prompts.state_dict(),
            "beta": self.beta.state_dict(),
            "micro_batch_limit": self.batches.limit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prompts.load_state_dict(state["prompts"])
        self.beta.load_state_dict(state["beta"])
        self.batches.limit = state["micro_batch_limit"]


def requests_of(comparisons: Sequence[Comparison]) -> list[Request]:
    return [Request(comparison.prompt.token_ids, comparison.completion_ids) for comparison in comparisons]


def scheduled_beta(start: float, config: BetaConfig, step: int, total_steps: int) -> float:
    """The beta of the step with this index, from 0: `start` at the first, `config.final` at the last."""
    if config.schedule == "constant" or config.final is None:
        return start
    progress = min(1.0, step / max(1, total_steps - 1))
    if config.schedule == "cosine":
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    return start + (config.final - start) * progress


class BetaController:
    """Beta for each step, with a state that resumes exactly.

    With `gap_gain` α the scheduled β₀ becomes β = (1 + α (g − g₀)) β₀, kept within [min, max], where g is the
    mean log-ratio gap of chosen over rejected times β₀, and g₀ the running mean of the gaps before it (β-DPO,
    arXiv 2407.08639, batch-level calibration). The gap is that of the step before: a step's own is known only
    after its last micro-batch.

    Args:
        start: the beta of the loss's configuration.
        config: the run's `preference.beta` section.
        total_steps: optimiser steps of the whole run.
    """

    def __init__(self, start: float, config: BetaConfig, *, total_steps: int) -> None:
        self._start = start
        self._config = config
        self._total_steps = total_steps
        self._excess = 0.0  # of the last step's gap over the running mean before it, in log-ratio
        self._running: float | None = None  # smoothed gap, in log-ratio

    def value(self, step: int) -> float:
        """The beta of the step with this index, from 0."""
        config = self._config
        beta = scheduled_beta(self._start, config, step, self._total_steps)
        beta *= 1.0 + config.gap_gain * beta * self._excess
        if config.max is not None:
            beta = min(beta, config.max)
        return beta if config.min is None else max(beta, config.min)

    def observe(self, gap: float) -> None:
        """Take in a finished step's mean log-ratio gap: chosen minus rejected, not multiplied by beta."""
        if self._running is None:
            self._running = gap
        smoothing = self._config.gap_smoothing
        self._excess = gap - self._running
        self._running = smoothing * self._running + (1 - smoothing) * gap

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"excess": self._excess, "running": self._running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._excess, self._running = state["excess"], state["running"]
