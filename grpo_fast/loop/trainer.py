"""The GRPO loop: sample prompts, generate a group of completions each, score, compute advantages, update."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.section import plural
from grpo_fast.config.stages import Stage, schedule_steps, stage_at
from grpo_fast.data import Prompt, PromptDataset, PromptSampler
from grpo_fast.data.table import BASELINE, CompletionTable
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.environments import Toolsets
from grpo_fast.groups.formation import with_enough
from grpo_fast.groups.weights import AdaptiveWeights
from grpo_fast.loop.algorithm import Algorithm
from grpo_fast.loop.collect import (
    KL,
    OVERLONG,
    RolloutWatch,
    describe,
    generate,
    overlong_penalties,
    part_weights,
    parts_of,
    score,
    to_train,
    with_advantages,
    with_penalties,
)
from grpo_fast.loop.columns import EXTRA, with_loss_columns
from grpo_fast.loop.context import CONTEXT, TeacherContext
from grpo_fast.loop.evaluate import Evaluation, criterion, evaluate
from grpo_fast.loop.update import PolicyUpdate
from grpo_fast.policy import Policy, PolicyOptimizer
from grpo_fast.policy.architecture import rounding_nats
from grpo_fast.record.logs import Clock, SampleRecord
from grpo_fast.rewards import RewardSet
from grpo_fast.rollout import Completion, Engine, Rollout, generate_rollout, sampling_of
from grpo_fast.rollout.engines import ENGINES, draws_with_policy
from grpo_fast.rollout.handover import DeviceHandover
from grpo_fast.rollout.sampling import derive_seed

# Spaced so that neither rollouts of different steps nor runs with neighboring seeds share a seed.
SEEDS_PER_RUN, SEEDS_PER_STEP = 10**9, 10**3
COMPARED = 64  # the most completions of the first step that are compared with the policy
COMPARE_EVERY = 10  # steps between those whose engine log-probabilities are only compared with the policy's


@dataclass(frozen=True)
class StageParts:
    """A stage with its rewards and prompts. It shares objects that do not change with the stage before."""

    stage: Stage
    rewards: RewardSet
    dataset: PromptDataset
    prompts: PromptSampler
    adaptive_weights: AdaptiveWeights | None = None
    toolsets: Toolsets | None = None
    rollout: Rollout = generate_rollout
    context: TeacherContext | None = None  # of a teacher with a longer prompt
    given: Mapping[int, Completion] = field(default_factory=dict)  # completions of the data, by row


class Trainer(Algorithm):
    """Group-relative policy optimization.

    Each rank generates and scores its share of a step's prompts; then all have all groups, and compute the
    same up to the update. `config`, `eval_rewards` and `eval_rollout_fn` hold for every stage's evaluation.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        policy: Policy,
        engine: Engine,
        optimizer: PolicyOptimizer,
        stages: Sequence[StageParts],
        eval_rewards: RewardSet,
        eval_rollout_fn: Rollout = generate_rollout,
        held_out: Sequence[Prompt] = (),
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.handover = DeviceHandover(engine, policy, optimizer, config.memory)
        first, ready = stages[0].stage.config, self.handover.await_reference
        self.update = PolicyUpdate(policy, optimizer, first, ready, world)
        super().__init__(policy, optimizer, self.update.annotator, stages[0].prompts, world)
        self.engine: Engine = engine
        self.stages = stages
        self.eval_rewards = eval_rewards
        self.eval_rollout_fn = eval_rollout_fn
        self.held_out = held_out
        self.run_steps = config.max_steps
        self.parts: dict[str, float] = {}  # weights of the step's rewards and penalties
        self.sampler_seen = False  # this process has compared completions with the policy
        self.evaluation = config.evaluation
        if eval_rewards.names:
            deciding = eval_rewards.names[eval_rewards.position(config.evaluation.reward)]
            self.criterion = criterion(deciding, config.evaluation.threshold)
        self.evaluation_sampling = replace(
            sampling_of(config.rollout),
            temperature=config.evaluation.temperature,
            seed=world.seed(config.seed),
        )
        for rollout in (eval_rollout_fn, *(parts.rollout for parts in stages)):
            self.held.callback(getattr(rollout, "close", lambda: None))  # of environments
        self.held.enter_context(engine)
        self.enter(0)

    def enter(self, index: int) -> None:
        parts = self.stages[index]
        self.stage = index
        self.config = parts.stage.config.with_sampler(draws_with_policy=draws_with_policy(self.engine.name))
        self.rewards = parts.rewards
        self.prompts = parts.prompts
        self.rollout_fn = parts.rollout
        self.adaptive_weights = parts.adaptive_weights
        self.sampling = sampling_of(self.config.rollout)
        self.update.configure(self.config)
        total_steps = schedule_steps([parts.stage for parts in self.stages], index)
        self.optimizer.configure(self.config.optimizer, total_steps=total_steps)

    def described(self) -> dict[str, str]:
        rollout, correction = self.config.rollout, self.config.loss.sampler_correction
        corrected = "" if correction in (None, "none") else f", corrected by {correction}"
        groups = (
            f"{plural(self.config.prompts_per_step, 'prompt')} a step, {rollout.num_generations} "
            f"completions of each, at most {plural(rollout.max_completion_length, 'token')}, by "
            f"{type(self.engine).__name__}{corrected}; rewards: {', '.join(self.rewards.names) or 'none'}"
        )
        teacher = self.config.reference.path
        lines = {
            "groups": groups,
            "teacher": "" if teacher is None else f"{teacher}, the reference of the KL",
            "rollout": getattr(self.rollout_fn, "described", ""),
        }
        return {name: text for name, text in lines.items() if text}

    def begin(self) -> None:
        super().begin()
        due = stage_at([parts.stage for parts in self.stages], self.step)
        if due != self.stage:
            self.enter(due)
            if self.stages[due].stage.fresh_optimizer:
                self.optimizer.reset_state()

    def learn(self, table: CompletionTable, clock: Clock) -> dict[str, float]:
        metrics = {}
        if CONTEXT in table.objects:
            seen = [row for row, context in enumerate(table.objects[CONTEXT]) if context is not None]
            metrics["completion/taught"] = len(seen) / max(1, len(table))
            table = table.select(seen)
        trained, totals = to_train(table, self.config.advantage, self.config.loss)
        self.handover.to_trainer()
        if len(table) and not self.sampler_seen:  # before the first update
            self.sampler_seen = self.require_own_completions(table)
        return metrics | self.update.run(trained, totals, clock)

    def timings(self, table: CompletionTable, seconds: float) -> dict[str, float]:
        found = self.handover.timings()
        found["tokens_per_second"] = int(table.num_targets.sum()) / seconds
        taken = table.facts["episode"][:, -1] if len(table) else torch.zeros(0)
        if len(taken := taken[~taken.isnan()]):
            found["environment/seconds"] = taken.mean().item()
        return found

    def require_own_completions(self, table: CompletionTable) -> bool:
        """Compare the first completions' log-probabilities with the policy's; return whether that is done.

        Custom rollouts and truncated distributions have other log-probabilities, and are not compared.
        """
        rollout, switched_off = self.config.rollout, self.config.alerts.sampler_drift is None
        if switched_off or rollout.function is not None or rollout.truncations:
            return True
        rows = range(0, len(table), -(-len(table) // COMPARED))
        difference = self.update.sampler_difference(table.select(rows))
        model, engine = self.policy.base_model, self.engine.name
        allowed = rounding_nats(model.dtype, model.device.type)
        if difference is None or difference <= allowed:
            return difference is not None
        others = " or ".join(name for name in ENGINES if name != engine)
        raise ValueError(
            f"the first completions are of another policy: rollout.engine = {engine!r} and the trainer are "
            f"{difference:.2g} nats a token apart, where {allowed:g} is rounding in {model.dtype}; set "
            f"rollout.engine to {others}, or model.attention to another, or, where it is meant so, "
            "alerts.sampler_drift to null"
        )

    def collect(self, clock: Clock) -> tuple[CompletionTable, dict[str, float]]:
        """Collect a batch of groups; with dynamic sampling (DAPO, arXiv:2503.14476) only non-flat groups."""
        config = self.config.advantage
        wanted = self.config.prompts_per_step
        prompts: list[Prompt] = []
        draws: list[CompletionTable] = []
        self.prompts.begin(self.step, self.run_steps)
        for draw in range(config.max_draws if config.dynamic_sampling else 1):
            prompts += (asked := self.prompts.next())
            draws.append(self.grouped(asked, self.rollout(asked, draw, clock), clock))
            drawn = self.with_advantages(CompletionTable.join(draws), clock)
            if config.dynamic_sampling and (~drawn.by_group("flat")[:, 0]).sum() >= wanted:
                break
        before_penalties, penalties = drawn, self.penalties(drawn, clock)
        self.parts = part_weights(self.rewards.names, self.reward_weights, penalties)
        if penalties:
            drawn = self.with_advantages(with_penalties(drawn, penalties), clock)
        metrics = describe(drawn, [*self.parts])
        metrics |= self.update_curriculum_and_weights(prompts, before_penalties)
        if not config.dynamic_sampling:
            return drawn, metrics
        # By the rewards alone: a penalty must not make a flat group train.
        live = (~before_penalties.by_group("flat")[:, 0]).nonzero()[:, 0].tolist()
        metrics |= {"groups/drawn": len(prompts), "groups/missing": max(0, wanted - len(live))}
        chosen = drawn.select_groups(live[:wanted])
        if not len(chosen):
            return chosen, metrics
        by_batch = config.scales_parts or config.rescale_flat_groups or config.function
        if by_batch or config.scale_rewards not in ("group", "mean", "none"):
            chosen = self.with_advantages(chosen, clock)  # over the groups that train
        return chosen, metrics

    def penalties(self, table: CompletionTable, clock: Clock) -> dict[str, Tensor]:
        """Compute the (S,) penalties for length and KL, which are subtracted from the rewards."""
        penalties, limit = {}, self.config.rollout.max_completion_length
        if self.config.advantage.soft_overlong is not None:
            penalties[OVERLONG] = overlong_penalties(table, limit, self.config.advantage.soft_overlong)
        if self.config.loss.kl_in_reward:
            self.handover.to_trainer()
            with clock("logprobs"):
                penalties[KL] = self.update.kl_penalties(table)
        return penalties

    def rollout(self, prompts: Sequence[Prompt], draw: int, clock: Clock) -> CompletionTable:
        """Generate and score completions of each prompt, on all ranks."""
        local: list[CompletionTable] = []

        def work() -> dict[str, Tensor]:
            local.append(self.local_rollout(self.world.share(prompts), draw, clock))
            return local[0].tensors()

        tables = [*map(CompletionTable.from_tensors, self.world.gather_tensors("the rollout", work))]
        tables[self.world.rank] = local[0]
        context = self.stages[self.stage].context
        reads_texts = self.config.advantage.function or self.prompts.reads_texts or context is not None
        if self.world.size > 1 and reads_texts:
            objects = self.world.gather_from_all("the completions", lambda: local[0].objects)
            tables = [replace(table, objects=texts) for table, texts in zip(tables, objects, strict=True)]
        joined = CompletionTable.join(tables)
        if any(prompt.images for prompt in prompts):  # every rank has them already
            images = tuple(prompts[group].images for group in joined.groups.tolist())
            joined = joined.with_objects(images=images)
        return joined if context is None else context.of(joined)

    def local_rollout(self, prompts: Sequence[Prompt], draw: int, clock: Clock) -> CompletionTable:
        """Generate and score this rank's completions, or score those of the data."""
        if not self.on_policy:
            given = self.stages[self.stage].given
            with clock("reward"):
                return score(prompts, [[given[prompt.index]] for prompt in prompts], self.rewards)
        seed = self.world.seed(self.config.seed * SEEDS_PER_RUN + self.step * SEEDS_PER_STEP + draw)
        self.handover.to_engine()
        read = self.config.old_logprobs == "sampler" or self.config.loss.reads_sampler
        logprobs = read or self.step % COMPARE_EVERY == 0
        sampling = replace(self.sampling, seed=seed, logprobs=logprobs)
        n = self.config.rollout.num_generations
        weights = None if self.adaptive_weights is None else self.adaptive_weights.weights
        self.rewards.step, self.rewards.max_steps = self.step, self.run_steps
        options: Any = {"rollout": self.rollout_fn, "progress": self.on_progress}
        with clock("generate"):
            completions, early = generate(self.engine, prompts, n, sampling, self.rewards, **options)
        if self.config.rollout.router_replay and any(c.experts is None for g in completions for c in g):
            raise ValueError(
                "rollout.router_replay = true, and the rollout's completions do not tell their experts: hand "
                "on the `experts` of what the engine gives, or leave it out"
            )
        with clock("reward"):
            table = score(prompts, completions, self.rewards, weights=weights, precomputed=early.values())
            return with_loss_columns(table, self.config.loss.columns)

    @property
    def on_policy(self) -> bool:
        """This step's completions are sampled from the policy: GKD, arXiv:2306.13649, algorithm 1."""
        number = random.Random(derive_seed(self.config.seed, self.step)).random()
        return number < self.config.rollout.on_policy_share

    def grouped(self, prompts: Sequence[Prompt], table: CompletionTable, clock: Clock) -> CompletionTable:
        """Add the fact `baseline_group` (S,) where prompts may share a baseline.

        Rank 0 forms the groups, since a user's function may not return the same on each rank.
        """
        if not self.config.groups.shares_baselines:
            return table
        with clock("reward"):
            numbers = self.world.from_main("the groups", lambda: self.prompts.baseline_groups(prompts, table))
        return table.with_facts(**{BASELINE: torch.tensor(numbers)[table.groups]})

    def baselines(self, table: CompletionTable) -> list[int]:
        """Return the number of each prompt's baseline, or nothing where no prompts share one."""
        if BASELINE not in table.facts:
            return []
        numbers = table.by_group(BASELINE)[:, 0].tolist()
        return with_enough(numbers, self.config.groups.min_group_size)

    def with_advantages(self, table: CompletionTable, clock: Clock) -> CompletionTable:
        """Add the advantages."""
        if self.config.loss.distills:
            return table.with_facts(advantage=torch.zeros(len(table)))
        with clock("reward"):
            baselines = self.baselines(table) or None
            return with_advantages(table, self.config.advantage, self.reward_weights, baselines)

    @property
    def reward_weights(self) -> tuple[float, ...]:
        """Current weights of the reward functions."""
        return (self.adaptive_weights or self.rewards).weights

    def update_curriculum_and_weights(
        self, prompts: Sequence[Prompt], table: CompletionTable
    ) -> dict[str, float]:
        """Update curriculum and reward weights by the step's rewards; return the metrics from before."""
        metrics = self.prompts.metrics(prompts, self.baselines(table), table)
        if len(self.stages) > 1:
            metrics["stage"] = self.stage
        self.prompts.observe(prompts, table.by_group("reward"), table.by_group("reward_table"))
        if self.adaptive_weights is not None:
            metrics |= self.adaptive_weights.metrics()
            self.adaptive_weights.update(table.by_group("reward_table"))
        return metrics

    def evaluate(self, size: int | None = None) -> Evaluation:
        """Score the held-out prompts, or the first `size` of them."""
        self.handover.to_engine()
        rewards, config, sampling = self.eval_rewards, self.evaluation, self.evaluation_sampling
        rewards.step, rewards.max_steps = self.step, self.run_steps
        options: Any = {"rollout": self.eval_rollout_fn, "observer": RolloutWatch(self.on_progress)}
        questions = self.held_out[:size]
        return evaluate(self.engine, questions, rewards, config, sampling, world=self.world, **options)

    def samples(self, table: CompletionTable) -> list[SampleRecord]:
        """Return every completion of the first group, and the first of each other group."""
        n = len(table) // max(1, table.num_groups)
        groups = min(self.config.logging.samples, table.num_groups)
        rows = [row for row in range(groups * n) if row < n or row % n == 0]

        def local() -> dict[int, SampleRecord]:
            completions = table.objects.get("completion", ())
            return {row: self.sample(table, row) for row in rows if completions[row] is not None}

        samples: dict[int, SampleRecord] = {}
        for records in self.world.gather_from_all("the samples", local):
            samples |= records
        return [samples[row] for row in rows]

    def sample(self, table: CompletionTable, row: int) -> SampleRecord:
        """Return the record of a completion of this rank."""
        objects = {name: values[row] for name, values in table.objects.items()}
        completion, asked = objects["completion"], objects["prompt"]
        return SampleRecord(
            group=int(table.groups[row]),
            question=asked.prompt,
            prompt=str(self.policy.tokenizer.decode(list(asked.token_ids))),
            completion=completion.text,
            rewards=dict(zip(self.parts, parts_of(table)[row].tolist(), strict=True)),
            weights=self.parts,
            reward=table.facts["reward"][row].item(),
            advantage=table.facts["advantage"][row].item(),
            truncated=completion.truncated,
            num_tokens=completion.num_sampled,
            extra={name.removeprefix(EXTRA): v for name, v in objects.items() if name.startswith(EXTRA)},
            messages=None if completion.episode is None else completion.episode.messages,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "prompts": self.prompts.state_dict(),
            "adaptive_weights": self.adaptive_weights and self.adaptive_weights.state_dict(),
            **self.update.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.enter(state["stage"])
        self.prompts.load_state_dict(state["prompts"])
        if self.adaptive_weights is not None:
            self.adaptive_weights.load_state_dict(state["adaptive_weights"])
        self.update.load_state_dict(state)
