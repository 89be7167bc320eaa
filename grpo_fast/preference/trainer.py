"""Training on fixed completions of known worth: preferences and ranked groups.

Draw prompts with their completions, compute the policy's log-probability of each, let the loss compare them,
step. The reference's log-probabilities are known before the first step, so its model is not in memory, and
nothing is generated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_fast.data import PromptSampler
from grpo_fast.objective.metrics import sum_metrics
from grpo_fast.objective.pairs import kto_reference_point, preference_loss
from grpo_fast.objective.ranking import ranking_loss
from grpo_fast.objective.types import LossOutputs, present
from grpo_fast.policy import Policy, PolicyOptimizer
from grpo_fast.policy.host_memory import bytes_in_use
from grpo_fast.policy.out_of_memory import optimizer_step
from grpo_fast.preference.comparison import Comparison, preference_inputs, preference_totals, ranked_inputs
from grpo_fast.preference.config import BetaConfig, PreferenceConfig
from grpo_fast.preference.evaluation import RankingEvaluation
from grpo_fast.preference.scoring import ComparisonBatches, score, sequence_logprobs
from grpo_fast.run_record.logs import Clock, StepResult

StepLoss = Callable[[Sequence[Comparison], Tensor], LossOutputs]
"""Some of a step's comparisons and the (S,) log-probabilities of their completions, in order, to their share
of the step's loss."""


class PreferenceTrainer:
    """A preference or ranking run: its state, its optimiser steps and its evaluation.

    Args:
        preference: the losses, and how beta moves.
        ranks: whether ranked groups are compared, instead of pairs or labelled completions.
        total_steps: optimiser steps of the whole run.
        micro_batch_tokens: tokens of a micro-batch, while the memory holds them.
        prompts: draws what a step compares.
        comparisons: the completions of each prompt, by its row.
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
        held_out: Sequence[Comparison] = (),
    ) -> None:
        self.preference = preference
        self.policy = policy
        self.optimizer = optimizer
        self.prompts = prompts
        self.comparisons = comparisons
        self.held_out = held_out
        self.batches = ComparisonBatches(policy, micro_batch_tokens)
        self.step = 0
        self.ranks = ranks
        self.beta = BetaController(present(preference.loss.beta), preference.beta, total_steps=total_steps)

    def train_step(self) -> StepResult:
        clock = Clock()
        with clock("step"):
            comparisons = [self.comparisons[prompt.index] for prompt in self.prompts.next()]
            metrics = self.update(comparisons, clock)
        self.step += 1
        self.optimizer.advance()
        tokens = sum(comparison.num_tokens for comparison in comparisons)
        timings = {
            "tokens_per_second": tokens / clock.seconds["time/step"],
            "memory/micro_batch_tokens": self.batches.max_tokens,
            "memory/peak_bytes": bytes_in_use(self.policy.device),
        }
        return StepResult(metrics, clock.seconds | timings)

    def update(self, comparisons: Sequence[Comparison], clock: Clock) -> dict[str, float]:
        """The gradient of the step's comparisons in micro-batches that fit, then the step."""
        beta = self.beta.value(self.step)
        with clock("logprobs"):
            loss = self.step_loss(comparisons, beta)
        with clock("update"):
            for attempt, parts in self.batches.attempts_at(comparisons):
                with attempt:
                    shares, learns = self.gradient(comparisons, loss, parts)
            metrics = sum_metrics(shares)
            metrics |= {"learning_rate": self.optimizer.learning_rate, "update/skipped": float(not learns)}
            if learns:
                metrics["grad_norm"] = optimizer_step(self.optimizer)
        if not self.ranks:
            metrics["beta"] = beta
            self.beta.observe(metrics["rewards/margins"] / beta)
        return metrics

    def step_loss(self, comparisons: Sequence[Comparison], beta: float) -> StepLoss:
        """The loss of a step, with its counts, its beta and, for KTO, its reference point."""
        if self.ranks:
            config, total = self.preference.ranking, len(comparisons)
            return lambda some, logprobs: ranking_loss(ranked_inputs(some, logprobs, total), config)
        loss, totals, kl = replace(self.preference.loss, beta=beta), preference_totals(comparisons), None
        if not loss.paired:
            pairs = [replace(c, completion_ids=(present(c.mismatched_ids),)) for c in comparisons]
            now = torch.cat(score(pairs, self.batches))
            before = now.new_tensor([c.ref_logprobs[-1] for c in comparisons])
            kl = kto_reference_point(now, before).to(self.policy.device)
        return lambda some, logprobs: preference_loss(preference_inputs(some, logprobs, totals, kl), loss)

    def gradient(
        self, comparisons: Sequence[Comparison], loss: StepLoss, parts: Sequence[Sequence[int]]
    ) -> tuple[list[dict[str, Tensor]], bool]:
        """Backward through every micro-batch: their shares of the metrics, and whether any has a gradient.

        The losses of the micro-batches add up; groups that are all ties have no gradient.
        """
        self.optimizer.zero_grad()  # of an attempt that failed
        chosen = [[comparisons[i] for i in part] for part in parts]
        if self.preference.loss.couples and len(parts) > 1 and not self.ranks:
            return self.backward_coupled(chosen, loss), True
        shares, learns = [], False
        for part in chosen:
            out = loss(part, self.logprobs(part))
            if out.loss.requires_grad:
                out.loss.backward()
                learns = True
            shares.append(out.metrics | {"loss": out.loss.detach()})
        return shares, learns

    def backward_coupled(
        self, parts: Sequence[Sequence[Comparison]], loss: StepLoss
    ) -> list[dict[str, Tensor]]:
        """For a loss that compares all pairs of the step, at the price of one forward more.

        Its gradient in the log-probabilities comes first, then each micro-batch's share of it (GradCache,
        arXiv 2101.06983).
        """
        with torch.no_grad():
            values = [self.logprobs(part) for part in parts]
        leaves = torch.cat(values).requires_grad_()
        out = loss([comparison for part in parts for comparison in part], leaves)
        (gradient,) = torch.autograd.grad(out.loss, leaves)
        for part, share in zip(parts, gradient.split([len(v) for v in values]), strict=True):
            (self.logprobs(part) * share).sum().backward()
        return [out.metrics | {"loss": out.loss.detach()}]

    def logprobs(self, comparisons: Sequence[Comparison]) -> Tensor:
        """(S,) log-probability of every completion, with gradient where that is enabled."""
        weight = self.policy.head.weight
        weight_grad = self.optimizer.gradient_of(weight) if torch.is_grad_enabled() else None
        return sequence_logprobs(self.policy, comparisons, weight_grad)

    def evaluate(self, size: int | None = None) -> RankingEvaluation:
        """How log-probabilities order the held-out completions, or those of the first `size` prompts."""
        chosen = self.held_out[:size]
        logprobs = tuple(tuple(found.tolist()) for found in score(chosen, self.batches))
        config = self.preference.ranking if self.ranks else self.preference.loss
        return RankingEvaluation(tuple(chosen), logprobs, config.averaged)

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


class BetaController:
    """Beta for each step, with a state that resumes exactly.

    The schedule leads from `start` at the first step to `config.final` at the last. With `gap_gain` α its β₀
    becomes β = (1 + α (g − g₀)) β₀, kept within [min, max], where g is the mean log-ratio gap of chosen over
    rejected times β₀, and g₀ the running mean of the gaps before it (β-DPO, arXiv 2407.08639, batch-level
    calibration). The gap is that of the step before: a step's own is known only after its last micro-batch.

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
        config, beta = self._config, self._start
        if config.final is not None:
            progress = min(1.0, step / max(1, self._total_steps - 1))
            if config.schedule == "cosine":
                progress = 0.5 * (1.0 - math.cos(math.pi * progress))
            beta += (config.final - beta) * progress
        beta *= 1.0 + config.gap_gain * beta * self._excess
        return max(config.min or 0.0, min(beta, config.max or math.inf))

    def observe(self, gap: float) -> None:
        """Take in a finished step's mean log-ratio gap: chosen minus rejected, not multiplied by beta."""
        running = gap if self._running is None else self._running
        smoothing = self._config.gap_smoothing
        self._excess = gap - running
        self._running = smoothing * running + (1 - smoothing) * gap

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"excess": self._excess, "running": self._running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._excess, self._running = state["excess"], state["running"]
