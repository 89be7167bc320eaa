"""The loop.

Sample prompts, let the policy answer each several times, score the answers, compare each with the
others of its prompt, move the policy towards the better ones. What has no gradient is not computed:
no reference model without a KL term, no second forward for old log-probabilities when the step is
exactly on-policy, no tokens of groups that all earned the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from grpo_fast.config import TrainConfig
from grpo_fast.data import PromptSampler
from grpo_fast.data.types import Prompt
from grpo_fast.evaluate import Evaluation, evaluate
from grpo_fast.experience import Group, describe, make_samples, score_groups
from grpo_fast.head import GRPOLossOutput, HeadOutput, linear_grpo_loss, linear_logprob
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.objective.entropy import EntropyController, entropy_threshold
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer, ReferencePolicy, Sample, pack
from grpo_fast.rewards import RewardSet
from grpo_fast.rollout import Engine, Sampling

# Spaced so that no two draws of any two steps, nor of runs with neighbouring seeds, share a seed.
SEEDS_PER_RUN, SEEDS_PER_STEP = 10**9, 10**3


class Clock:
    """Seconds spent in each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[f"time/{phase}"] = self.seconds.get(f"time/{phase}", 0.0) + elapsed


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    groups: list[Group]
    metrics: dict[str, float]
    timings: dict[str, float]


class Trainer:
    """The state of a run, and the verbs that change it."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        policy: Policy,
        engine: Engine,
        optimizer: PolicyOptimizer,
        prompts: PromptSampler,
        rewards: RewardSet,
        held_out: Sequence[Prompt] = (),
    ) -> None:
        self.config = config
        self.policy = policy
        self.engine = engine
        self.optimizer = optimizer
        self.prompts = prompts
        self.rewards = rewards
        self.held_out = held_out
        self.step = 0
        self.entropy_controller = EntropyController.of(config.loss)
        self.sampling = Sampling(
            max_completion_length=config.rollout.max_completion_length,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            min_p=config.rollout.min_p,
            stop=tuple(config.rollout.stop),
        )

    def train_step(self) -> StepResult:
        """Rollout, rewards, advantages, update."""
        clock = Clock()
        with clock("step"):
            groups, metrics = self.collect(clock)
            samples, totals = make_samples(groups, self.config.advantage)
            metrics |= self.update(samples, totals, clock)
        self.step += 1
        tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
        timings = clock.seconds | {"tokens_per_second": tokens / clock.seconds["time/step"]}
        return StepResult(groups, metrics, timings)

    def collect(self, clock: Clock) -> tuple[list[Group], dict[str, float]]:
        """One batch of groups; with dynamic sampling (DAPO, arXiv:2503.14476) only those with spread."""
        config = self.config.advantage
        wanted = self.config.prompts_per_step
        drawn: list[Group] = []
        for draw in range(config.max_draws if config.dynamic_sampling else 1):
            drawn += self.rollout(self.prompts.next(), draw, clock)
            live = [group for group in drawn if not group.flat]
            if len(live) >= wanted:
                break
        metrics = describe(drawn, self.rewards.names)
        if not config.dynamic_sampling:
            return drawn, metrics
        return live[:wanted], metrics | {"groups/drawn": len(drawn), "groups/missing": max(0, wanted - len(live))}

    def rollout(self, prompts: Sequence[Prompt], draw: int, clock: Clock) -> list[Group]:
        """Completions of each prompt, scored against each other."""
        seed = self.config.seed * SEEDS_PER_RUN + self.step * SEEDS_PER_STEP + draw
        with clock("generate"):
            completions = self.engine.generate(
                [prompt.token_ids for prompt in prompts],
                self.config.rollout.num_generations,
                replace(self.sampling, seed=seed),
            )
        with clock("reward"):
            return score_groups(prompts, completions, self.rewards, self.config.advantage)

    def update(self, samples: Sequence[Sample], totals: StepTotals, clock: Clock) -> dict[str, float]:
        """`num_iterations` epochs of optimiser steps over one rollout; their mean metrics."""
        if not samples:
            return {"update/skipped": 1.0, "learning_rate": self.optimizer.learning_rate}
        minibatches = [(self.pack(part), share) for part, share in self.split(samples, totals)]
        with clock("logprobs"):
            minibatches = [(self.with_fixed_logprobs(batches), share) for batches, share in minibatches]
        steps = []
        with clock("update"):
            for _ in range(self.config.num_iterations):
                steps += [self.optimise(batches, share) for batches, share in minibatches]
        return mean_metrics(steps) | {"update/skipped": 0.0}

    def split(self, samples: Sequence[Sample], totals: StepTotals) -> list[tuple[list[Sample], StepTotals]]:
        """Minibatches of whole groups, each with its share of the counts."""
        groups = sorted({sample.group_id for sample in samples})
        parts = min(self.config.minibatches, len(groups))
        share = StepTotals(totals.num_tokens / parts, totals.num_sequences / parts)
        part_of = {group_id: i % parts for i, group_id in enumerate(groups)}
        return [([s for s in samples if part_of[s.group_id] == part], share) for part in range(parts)]

    def pack(self, samples: Sequence[Sample]) -> list[PackedBatch]:
        return pack(
            samples,
            max_tokens=self.config.micro_batch_tokens,
            share_prompts=self.policy.shares_prompts,
            device=self.policy.device,
        )

    @torch.no_grad()
    def with_fixed_logprobs(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """Old and reference log-probabilities, each only where the loss needs it."""
        off_policy = self.config.num_iterations * self.config.minibatches > 1
        if off_policy:
            batches = [replace(b, old_logprobs=self.head_outputs(self.policy, b).logprob) for b in batches]
        if self.config.loss.needs_reference:
            with self.policy.reference() as reference:
                batches = [replace(b, ref_logprobs=self.head_outputs(reference, b).logprob) for b in batches]
        return list(batches)

    def head_outputs(
        self, policy: Policy | ReferencePolicy, batch: PackedBatch, *outputs: str
    ) -> HeadOutput:
        """(N,) float32 log-probabilities at the sampling temperature, and `outputs` besides."""
        head = policy.head
        return linear_logprob(
            policy.hidden_states(batch),
            head.weight,
            batch.targets,
            bias=head.bias,
            temperature=self.sampling.temperature,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            outputs=("logprob", *outputs),
        )

    def optimise(self, batches: Sequence[PackedBatch], totals: StepTotals) -> dict[str, float]:
        """One optimiser step; the losses of its micro-batches add up to the step's."""
        config = self.loss_config()
        if config.top_entropy_quantile < 1 and len(batches) > 1:
            totals = replace(totals, entropy_threshold=self.entropy_threshold(batches))
        shares = []
        for batch in batches:
            out = self.loss(batch, totals, config)
            out.loss.backward()
            shares.append(out.metrics | {"loss": out.loss.detach()})
        learning_rate = self.optimizer.learning_rate
        grad_norm = self.optimizer.step()
        metrics = sum_metrics(shares) | {"grad_norm": grad_norm, "learning_rate": learning_rate}
        if config.use_adaptive_entropy:
            self.entropy_controller.update(metrics["entropy"])
            metrics["entropy_coef"] = config.entropy_coef
        return metrics

    def loss_config(self) -> GRPOLossConfig:
        """The configured loss with what only the run knows."""
        config = self.config.loss
        if config.loss_type == "dr_grpo" and config.max_completion_length is None:
            config = replace(config, max_completion_length=self.sampling.max_completion_length)
        if config.use_adaptive_entropy:
            config = replace(config, entropy_coef=self.entropy_controller.active_coef)
        return config

    @torch.no_grad()
    def entropy_threshold(self, batches: Sequence[PackedBatch]) -> float:
        """The cut of `top_entropy_quantile` over the whole step, so that micro-batching does not move it."""
        entropies = torch.cat([self.head_outputs(self.policy, b, "entropy").entropy for b in batches])
        masks = torch.cat([batch.loss_mask for batch in batches])
        return entropy_threshold(entropies, masks, self.config.loss.top_entropy_quantile)

    def loss(self, batch: PackedBatch, totals: StepTotals, config: GRPOLossConfig) -> GRPOLossOutput:
        head = self.policy.head
        return linear_grpo_loss(
            self.policy.hidden_states(batch),
            head.weight,
            batch.targets,
            batch.advantages,
            sequence_ids=batch.sequence_ids,
            num_sequences=batch.num_sequences,
            group_ids=batch.group_ids,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
            sampler_logprobs=batch.sampler_logprobs,
            loss_mask=batch.loss_mask,
            totals=totals,
            config=config,
            bias=head.bias,
            temperature=self.sampling.temperature,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            entropy=True,
        )

    def evaluate(self, size: int | None = None) -> Evaluation:
        """Score of the held-out prompts, or of the first `size` of them."""
        config = self.config.evaluation
        return evaluate(
            self.engine,
            self.held_out[:size],
            self.rewards,
            sampling=replace(self.sampling, temperature=config.temperature, seed=self.config.seed),
            num_samples=config.num_samples,
            threshold=config.threshold,
            reward_name=config.reward,
        )


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
