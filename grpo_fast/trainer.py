"""The loop.

Sample prompts, let the policy answer each several times, score the answers, compare each with the
others of its prompt, move the policy towards the better ones. What has no gradient is not computed:
no reference model without a KL term, no second forward for old log-probabilities when the step is
exactly on-policy, no tokens of groups that all earned the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from grpo_fast.collection import Progress, RolloutWatch, generate_and_score
from grpo_fast.config import TrainConfig
from grpo_fast.data.types import Prompt
from grpo_fast.evaluate import Evaluation, evaluate
from grpo_fast.experience import Group, bare_sample, describe, make_samples, score_groups
from grpo_fast.head import GRPOLossOutput, HeadOutput, linear_logprob
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.objective.entropy import EntropyController, entropy_threshold
from grpo_fast.objective.loss import kl_penalty
from grpo_fast.packed_loss import packed_loss
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer, ReferencePolicy, Sample
from grpo_fast.rewards import RewardSet
from grpo_fast.rollout import Completion, Engine, sampling_of
from grpo_fast.rollout.adaptive_length import CompletionLength
from grpo_fast.rollout.handover import DeviceHandover, trainer_offloader
from grpo_fast.run_record.clock import Clock
from grpo_fast.run_record.logs import SampleRecord
from grpo_fast.stage_parts import StageParts
from grpo_fast.stages import schedule_steps, stage_at
from grpo_fast.update import MicroBatches, Minibatch, StepResult, mean_metrics, optimizer_step, sum_metrics

# Spaced so that no two draws of any two steps, nor of runs with neighbouring seeds, share a seed.
SEEDS_PER_RUN, SEEDS_PER_STEP = 10**9, 10**3


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
        self.on_progress: Progress | None = None  # told how every generation goes
        self.offloader = trainer_offloader(policy, optimizer, config.memory)
        self.handover = DeviceHandover(engine, policy, self.offloader)
        self.micro_batches = MicroBatches(policy)
        self.evaluation_sampling = replace(
            sampling_of(config.rollout),
            max_completion_length=config.rollout.length_limit,
            temperature=config.evaluation.temperature,
            seed=config.seed,
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
        self.length = CompletionLength.of(self.config.rollout)
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
            self.handover.to_trainer()
            metrics |= self.update(samples, totals, clock)
            self.handover.start_offload()
        self.step += 1
        self.optimizer.advance()
        tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
        timings = clock.seconds | self.handover.seconds()
        timings |= {
            "tokens_per_second": tokens / timings["time/step"],
            "memory/micro_batch_tokens": self.micro_batches.budget(self.config.micro_batch_tokens),
        }
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
        metrics |= self.length.metrics()
        self.length.observe([completion for group in groups for completion in group.completions])
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
        self.handover.to_engine()
        with clock("generate"):
            completions, early = generate_and_score(
                self.engine,
                prompts,
                self.config.rollout.num_generations,
                replace(self.sampling, max_completion_length=self.length.limit, seed=seed),
                self.rewards,
                progress=self.on_progress,
                last_decode=self.offloader.reload_if_room,
            )
        penalties = None
        if self.config.loss.kl_in_reward:
            self.handover.to_trainer()
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
                known=early.values() if early else {},
            )

    def kl_penalties(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> torch.Tensor:
        """(G, n) what the KL to the reference takes from each completion's reward."""
        pairs = zip(prompts, completions, strict=True)
        samples = [bare_sample(prompt, c, g) for g, (prompt, group) in enumerate(pairs) for c in group]
        totals = StepTotals(sum(len(sample.completion_ids) for sample in samples), len(samples))
        minibatch = self.micro_batches.minibatch(samples, totals, self.config.micro_batch_tokens)
        return self.micro_batches.fit(minibatch, self.sequence_penalties).view(len(prompts), -1)

    @torch.no_grad()
    def sequence_penalties(self, minibatch: Minibatch) -> torch.Tensor:
        """(S,) beta times the KL estimate, summed over each completion."""
        self.offloader.await_reload()
        penalties = torch.zeros(len(minibatch.samples))
        estimator = self.config.loss.kl_estimator or "k1"
        for batch in minibatch.batches:
            logprobs = self.head_outputs(self.policy, batch).logprob
            with self.policy.reference() as reference:
                ref_logprobs = self.head_outputs(reference, batch).logprob
            tokens = kl_penalty(logprobs, ref_logprobs, self.config.loss.beta, estimator)
            penalties.index_add_(0, batch.sample_ids[batch.sequence_ids].cpu(), tokens.cpu())
        return penalties

    def update(self, samples: Sequence[Sample], totals: StepTotals, clock: Clock) -> dict[str, float]:
        """`num_iterations` epochs of optimiser steps over one rollout; their mean metrics."""
        if not samples:
            return {"update/skipped": 1.0, "learning_rate": self.optimizer.learning_rate}
        fit, config = self.micro_batches.fit, self.config
        parts = self.micro_batches.split(samples, totals, config.minibatches, config.micro_batch_tokens)
        with clock("logprobs"):
            first, *later = parts
            minibatches = [fit(first, self.with_fixed_logprobs)]
            minibatches += [fit(part, partial(self.with_fixed_logprobs, stale=True)) for part in later]
        steps = []
        with clock("update"):
            for _ in range(config.num_iterations):
                for i, minibatch in enumerate(minibatches):
                    minibatches[i], metrics = self.optimise(minibatch)
                    steps.append(metrics)
        return mean_metrics(steps) | {"update/skipped": 0.0}

    @torch.no_grad()
    def with_fixed_logprobs(self, minibatch: Minibatch, *, stale: bool = False) -> Minibatch:
        """Old and reference log-probabilities, each only where the loss needs it.

        The policy moves before a `stale` minibatch's turn, so its old log-probabilities are computed now;
        the first one's are those of its own first forward.
        """
        batches = minibatch.batches
        if self.config.old_logprobs == "sampler":
            minibatch = minibatch.with_logprobs("old_logprobs", [b.sampler_logprobs for b in batches])
        elif stale:
            old = [self.head_outputs(self.policy, batch).logprob for batch in batches]
            minibatch = minibatch.with_logprobs("old_logprobs", old)
        if self.config.loss.needs_reference and not self.config.loss.kl_in_reward:
            self.offloader.await_reload()
            with self.policy.reference() as reference:
                logprobs = [self.head_outputs(reference, batch).logprob for batch in batches]
            minibatch = minibatch.with_logprobs("ref_logprobs", logprobs)
        return minibatch

    def head_outputs(self, policy: Policy | ReferencePolicy, batch: PackedBatch, *outputs: str) -> HeadOutput:
        """(N,) float32 log-probabilities at the sampling temperature, and `outputs` besides."""
        head = policy.head
        return linear_logprob(
            policy.hidden_states(batch),
            head.weight,
            batch.targets,
            temperature=self.sampling.temperature,
            outputs=("logprob", *outputs),
            **head.options,
        )

    def optimise(self, minibatch: Minibatch) -> tuple[Minibatch, dict[str, float]]:
        """One optimiser step; also the minibatch, as later epochs go on with it."""
        config = self.loss_config()
        minibatch, shares = self.micro_batches.fit(minibatch, partial(self.backward, config=config))
        learning_rate = self.optimizer.learning_rate
        self.offloader.await_reload()
        grad_norm = optimizer_step(self.optimizer)
        metrics = sum_metrics(shares) | {"grad_norm": grad_norm, "learning_rate": learning_rate}
        if config.use_adaptive_entropy:
            self.entropy_controller.update(metrics["entropy"])
            metrics["entropy_coef"] = config.entropy_coef
        return minibatch, metrics

    def backward(
        self, minibatch: Minibatch, config: GRPOLossConfig
    ) -> tuple[Minibatch, list[dict[str, torch.Tensor]]]:
        """The gradient of a step, and each micro-batch's share of its metrics; the losses add up.

        Before the first update the policy is the old one: what it computes here is kept for later epochs.
        """
        self.optimizer.zero_grad()  # of an attempt that failed
        totals = minibatch.totals
        if config.top_entropy_quantile < 1 and len(minibatch.batches) > 1:
            totals = replace(totals, entropy_threshold=self.entropy_threshold(minibatch.batches))
        shares, logprobs = [], []
        for batch in minibatch.batches:
            out = self.loss(batch, totals, config)
            out.loss.backward()
            shares.append(out.metrics | {"loss": out.loss.detach()})
            logprobs.append(out.logprobs)
        if minibatch.batches[0].old_logprobs is None:
            minibatch = minibatch.with_logprobs("old_logprobs", logprobs)
        return minibatch, shares

    def loss_config(self) -> GRPOLossConfig:
        """The configured loss with what only the run knows."""
        config = self.config.loss
        if config.loss_type == "dr_grpo" and config.max_completion_length is None:
            config = replace(config, max_completion_length=self.config.rollout.length_limit)
        if config.use_adaptive_entropy:
            config = replace(config, entropy_coef=self.entropy_controller.active_coef)
        return config

    @torch.no_grad()
    def entropy_threshold(self, batches: Sequence[PackedBatch]) -> float:
        """The cut of `top_entropy_quantile` over the whole step, so that micro-batching does not move it."""
        entropies = torch.cat([self.head_outputs(self.policy, b, "entropy").entropy for b in batches])
        return entropy_threshold(
            entropies, torch.ones_like(entropies, dtype=torch.bool), self.config.loss.top_entropy_quantile
        )

    def loss(self, batch: PackedBatch, totals: StepTotals, config: GRPOLossConfig) -> GRPOLossOutput:
        if self.config.old_logprobs == "sampler":  # they are the old ones already
            batch = replace(batch, sampler_logprobs=None)
        head, hidden = self.policy.head, self.policy.hidden_states(batch)
        return packed_loss(
            head,
            hidden,
            batch,
            config,
            totals=totals,
            temperature=self.sampling.temperature,
            weight_grad=self.optimizer.gradient_of(head.weight),
        )

    def evaluate(self, size: int | None = None) -> Evaluation:
        """Score of the held-out prompts, or of the first `size` of them."""
        config = self.config.evaluation
        self.handover.to_engine()
        return evaluate(
            self.engine,
            self.held_out[:size],
            self.judges,
            sampling=self.evaluation_sampling,
            num_samples=config.num_samples,
            threshold=config.threshold,
            reward_name=config.reward,
            observer=RolloutWatch(progress=self.on_progress),
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
            "completion_length": self.length.state_dict(),
            "micro_batch_limit": self.micro_batches.limit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.enter(state["stage"])
        self.prompts.load_state_dict(state["prompts"])
        if self.adaptive_weights is not None:
            self.adaptive_weights.load_state_dict(state["adaptive_weights"])
        self.entropy_controller = EntropyController.of(self.config.loss)
        self.entropy_controller.load_state_dict(state["entropy_controller"])
        self.length.load_state_dict(state["completion_length"])
        self.micro_batches.limit = state["micro_batch_limit"]
