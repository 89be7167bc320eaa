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
from typing import Any

import torch

from grpo_fast.config import TrainConfig
from grpo_fast.data.types import Prompt
from grpo_fast.evaluate import Evaluation, evaluate
from grpo_fast.experience import Group, bare_sample, describe, make_samples, score_groups
from grpo_fast.head import GRPOLossOutput, HeadOutput, linear_grpo_loss, linear_logprob
from grpo_fast.metrics import SampleRecord
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.objective.entropy import EntropyController, entropy_threshold
from grpo_fast.objective.kl import kl_penalty
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer, ReferencePolicy, Sample, pack
from grpo_fast.rewards import RewardSet
from grpo_fast.rollout import Completion, Engine, sampling_of
from grpo_fast.stage_parts import StageParts
from grpo_fast.stages import schedule_steps, stage_at

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
    """The state of a run, and the verbs that change it.

    Args:
        config: the run's; evaluation goes by it in every stage.
        stages: at least one; each brings the configuration, rewards and prompts that it trains with.
        judges: the rewards of evaluation, the same in every stage.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        policy: Policy,
        engine: Engine,
        optimizer: PolicyOptimizer,
        stages: Sequence[StageParts],
        judges: RewardSet,
        held_out: Sequence[Prompt] = (),
    ) -> None:
        self.policy = policy
        self.engine = engine
        self.optimizer = optimizer
        self.stages = stages
        self.judges = judges
        self.held_out = held_out
        self.step = 0
        self.evaluation_sampling = replace(
            sampling_of(config.rollout), temperature=config.evaluation.temperature, seed=config.seed
        )
        self.entropy_controller = EntropyController.of(stages[0].stage.config.loss)
        self.enter(0)

    def enter(self, index: int) -> None:
        """Go on with a stage's configuration, rewards and prompts."""
        parts = self.stages[index]
        self.stage = index
        self.config = parts.stage.config
        self.rewards = parts.rewards
        self.prompts = parts.prompts
        self.adaptive_weights = parts.adaptive_weights
        self.sampling = sampling_of(self.config.rollout)
        total_steps = schedule_steps([parts.stage for parts in self.stages], index)
        self.optimizer.configure(self.config.optimizer, total_steps=total_steps)

    def advance(self) -> None:
        """Enter the stage that the coming step belongs to, where it is another one."""
        due = stage_at([parts.stage for parts in self.stages], self.step)
        if due == self.stage:
            return
        loss = self.config.loss
        self.enter(due)
        if self.config.loss != loss:
            self.entropy_controller = EntropyController.of(self.config.loss)
        if self.stages[due].stage.fresh_optimizer:
            self.optimizer.forget()

    def train_step(self) -> StepResult:
        """Rollout, rewards, advantages, update."""
        self.advance()
        clock = Clock()
        with clock("step"):
            groups, metrics = self.collect(clock)
            samples, totals = make_samples(groups, self.config.advantage)
            with self.engine_asleep(clock):
                metrics |= self.update(samples, totals, clock)
        self.step += 1
        self.optimizer.advance()
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
        metrics = describe(drawn, self.rewards.names) | self.learn(drawn)
        if not config.dynamic_sampling:
            return drawn, metrics
        return live[:wanted], metrics | {
            "groups/drawn": len(drawn),
            "groups/missing": max(0, wanted - len(live)),
        }

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Let the sampler and the reward weights learn from what was earned; their metrics are of before."""
        prompts = [group.prompt for group in groups]
        metrics = self.prompts.metrics(prompts[: self.config.prompts_per_step])
        if len(self.stages) > 1:
            metrics["stage"] = self.stage
        rewards = torch.stack([group.rewards for group in groups])
        table = torch.stack([group.reward_table for group in groups])
        self.prompts.observe(prompts, rewards, table)
        if self.adaptive_weights is not None:
            metrics |= self.adaptive_weights.metrics()
            self.adaptive_weights.update(table)
        return metrics

    def rollout(self, prompts: Sequence[Prompt], draw: int, clock: Clock) -> list[Group]:
        """Completions of each prompt, scored against each other."""
        seed = self.config.seed * SEEDS_PER_RUN + self.step * SEEDS_PER_STEP + draw
        with clock("generate"):
            completions = self.engine.generate(
                [prompt.token_ids for prompt in prompts],
                self.config.rollout.num_generations,
                replace(self.sampling, seed=seed),
            )
        penalties = None
        if self.config.loss.kl_in_reward:
            with clock("logprobs"):
                penalties = self.kl_penalties(prompts, completions)
        with clock("reward"):
            return score_groups(
                prompts,
                completions,
                self.rewards,
                self.config.advantage,
                weights=None if self.adaptive_weights is None else self.adaptive_weights.weights,
                shared=self.prompts.shared(prompts),
                penalties=penalties,
            )

    @torch.no_grad()
    def kl_penalties(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> torch.Tensor:
        """(G, n) what the KL to the reference takes from each completion's reward."""
        pairs = zip(prompts, completions, strict=True)
        samples = [bare_sample(prompt, c, g) for g, (prompt, group) in enumerate(pairs) for c in group]
        penalties = torch.zeros(len(samples))
        estimator = self.config.loss.kl_estimator or "k1"
        for batch in self.pack(samples):
            logprobs = self.head_outputs(self.policy, batch).logprob
            with self.policy.reference() as reference:
                ref_logprobs = self.head_outputs(reference, batch).logprob
            tokens = kl_penalty(logprobs, ref_logprobs, self.config.loss.beta, estimator)
            penalties.index_add_(0, batch.sample_ids[batch.sequence_ids].cpu(), tokens.cpu())
        return penalties.view(len(prompts), -1)

    @contextmanager
    def engine_asleep(self, clock: Clock) -> Iterator[None]:
        """The engine gives its memory to the update, then takes over the new weights; also after an error."""
        with clock("sleep"):
            self.engine.sleep()
        try:
            yield
        finally:
            with clock("wake"):
                self.engine.wake()
                self.engine.sync(self.policy)

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
        """Minibatches of whole groups, each with its share of the counts; metrics count its own samples."""
        groups = sorted({sample.group_id for sample in samples})
        parts = min(self.config.minibatches, len(groups))
        part_of = {group_id: i % parts for i, group_id in enumerate(groups)}
        minibatches = [[s for s in samples if part_of[s.group_id] == part] for part in range(parts)]
        return [
            (
                members,
                StepTotals(
                    num_tokens=totals.num_tokens / parts,
                    num_sequences=totals.num_sequences / parts,
                    measured_tokens=sum(sum(sample.loss_mask) for sample in members),
                    measured_sequences=len(members),
                ),
            )
            for members in minibatches
        ]

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
        if self.config.loss.needs_reference and not self.config.loss.kl_in_reward:
            with self.policy.reference() as reference:
                batches = [replace(b, ref_logprobs=self.head_outputs(reference, b).logprob) for b in batches]
        return list(batches)

    def head_outputs(self, policy: Policy | ReferencePolicy, batch: PackedBatch, *outputs: str) -> HeadOutput:
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
            self.judges,
            sampling=self.evaluation_sampling,
            num_samples=config.num_samples,
            threshold=config.threshold,
            reward_name=config.reward,
        )

    def pick_samples(self, result: StepResult, count: int) -> list[SampleRecord]:
        """The first completion of each of the first `count` groups."""
        return [
            SampleRecord(
                prompt=self.policy.tokenizer.decode(group.prompt.token_ids),
                completion=group.completions[0].text,
                rewards=dict(zip(self.rewards.names, group.reward_table[0].tolist(), strict=True)),
                reward=group.rewards[0].item(),
                advantage=group.advantages[0][0],
                truncated=group.completions[0].truncated,
                num_tokens=len(group.completions[0].token_ids),
            )
            for group in result.groups[:count]
        ]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; what a resumed run needs besides the weights and the optimizer."""
        return {
            "stage": self.stage,
            "prompts": self.prompts.state_dict(),
            "adaptive_weights": self.adaptive_weights and self.adaptive_weights.state_dict(),
            "entropy_controller": self.entropy_controller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.enter(state["stage"])
        self.prompts.load_state_dict(state["prompts"])
        if self.adaptive_weights is not None:
            self.adaptive_weights.load_state_dict(state["adaptive_weights"])
        self.entropy_controller = EntropyController.of(self.config.loss)
        self.entropy_controller.load_state_dict(state["entropy_controller"])


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
