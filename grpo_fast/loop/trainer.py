"""The loop of GRPO: sample prompts, complete each several times, score, compare within a prompt, update."""

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

# Spaced so that no two draws of any two steps, nor of runs with neighbouring seeds, share a seed.
SEEDS_PER_RUN, SEEDS_PER_STEP = 10**9, 10**3
COMPARED = 64  # completions of the first step, at most, that are compared with the policy
COMPARE_EVERY = 10  # steps between those that ask for log-probabilities of the sampler only to compare them


@dataclass(frozen=True)
class StageParts:
    """A stage, its rewards and its prompts. What it leaves as it was is the object of the stage before."""

    stage: Stage
    rewards: RewardSet
    dataset: PromptDataset
    prompts: PromptSampler
    adaptive_weights: AdaptiveWeights | None = None
    toolsets: Toolsets | None = None
    rollout: Rollout = generate_rollout
    context: TeacherContext | None = None  # of a teacher that sees more
    given: Mapping[int, Completion] = field(default_factory=dict)  # the data's own, by its prompt's row


class Trainer(Algorithm):
    """Group-relative policy optimisation: what the loop collects is drawn, scored and compared.

    Args:
        config: the run's; evaluation goes by it in every stage.
        stages: at least one; each brings the configuration, rewards and prompts that it trains with.
        eval_rewards: the rewards of evaluation, the same in every stage.
        eval_rollout_fn: the rollout of evaluation, the same in every stage.
        world: the ranks that train together. Each answers and scores its share of a step's prompts; then all
            have all groups, and what follows is the same everywhere up to the update.
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
        self.update = PolicyUpdate(
            policy, optimizer, stages[0].stage.config, self.handover.await_reference, world
        )
        super().__init__(policy, optimizer, self.update.annotator, stages[0].prompts, world)
        self.engine: Engine = engine
        self.stages = stages
        self.eval_rewards = eval_rewards
        self.eval_rollout_fn = eval_rollout_fn
        self.held_out = held_out
        self.run_steps = config.max_steps
        self.parts: dict[str, float] = {}  # weight of each part of the step's rewards, penalties included
        self.sampler_seen = False  # whether this process has compared completions with the policy
        self.evaluation = config.evaluation
        if eval_rewards.names:
            deciding = eval_rewards.names[eval_rewards.position(config.evaluation.reward)]
            self.criterion = criterion(deciding, config.evaluation.threshold)
        self.evaluation_sampling = replace(
            sampling_of(config.rollout),
            max_completion_length=config.rollout.max_completion_length,
            temperature=config.evaluation.temperature,
            seed=world.seed(config.seed),
        )
        for rollout in (eval_rollout_fn, *(parts.rollout for parts in stages)):
            self.held.callback(getattr(rollout, "close", lambda: None))  # what environments hold
        self.held.enter_context(engine)
        self.enter(0)

    def enter(self, index: int) -> None:
        """Go on with a stage's configuration, rewards and prompts."""
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

    def advance(self) -> None:
        """Enter the stage that the coming step belongs to, where it is another one."""
        due = stage_at([parts.stage for parts in self.stages], self.step)
        if due == self.stage:
            return
        self.enter(due)
        if self.stages[due].stage.fresh_optimizer:
            self.optimizer.reset_state()

    def described(self) -> dict[str, str]:
        rollout, correction = self.config.rollout, self.config.loss.sampler_correction
        corrected = "" if correction in (None, "none") else f", corrected by {correction}"
        lines = {
            "groups": (
                f"{plural(self.config.prompts_per_step, 'prompt')} a step, {rollout.num_generations} "
                f"completions of each, at most {plural(rollout.max_completion_length, 'token')}, by "
                f"{type(self.engine).__name__}{corrected}; rewards: {', '.join(self.rewards.names) or 'none'}"
            )
        }
        if self.config.reference.path is not None:
            lines["teacher"] = f"{self.config.reference.path}, the reference of the KL"
        told = getattr(self.rollout_fn, "described", "")
        return lines | ({"rollout": told} if told else {})

    def begin(self) -> None:
        super().begin()
        self.advance()

    def learn(self, table: CompletionTable, clock: Clock) -> dict[str, float]:
        metrics = {}
        if CONTEXT in table.objects:
            seen = [row for row, context in enumerate(table.objects[CONTEXT]) if context is not None]
            metrics["completion/taught"] = len(seen) / max(1, len(table))
            table = table.select(seen)
        trained, totals = to_train(table, self.config.advantage, self.config.loss)
        self.handover.to_trainer()
        if len(table) and not self.sampler_seen:  # before anything is learnt from them
            self.sampler_seen = self.require_own_completions(table)
        return metrics | self.update.run(trained, totals, clock)

    def timings(self, table: CompletionTable, seconds: float) -> dict[str, float]:
        found = self.handover.timings()
        found["tokens_per_second"] = int(table.num_targets.sum()) / seconds
        taken = table.facts["episode"][:, -1] if len(table) else torch.zeros(0)
        if len(taken := taken[~taken.isnan()]):
            found["environment/seconds"] = taken.mean().item()
        return found

    def samples(self, table: CompletionTable) -> list[SampleRecord]:
        return self.pick_samples(table, self.config.logging.samples)

    def require_own_completions(self, table: CompletionTable) -> bool:
        """Whether there is nothing more to compare; False where the sampler has told no log-probabilities.

        A user's own rollout may bring others, and those of a truncated distribution have other probabilities.

        Raises:
            ValueError: this process's first completions are not of the policy that it trains.
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
            f"rollout.engine to {others}, or model.attention to "
            "another, or, where it is meant so, alerts.sampler_drift to null"
        )

    def collect(self, clock: Clock) -> tuple[CompletionTable, dict[str, float]]:
        """One batch of groups; with dynamic sampling (DAPO, arXiv:2503.14476) only those with spread."""
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
        metrics = describe(drawn, [*self.parts]) | self.update_curriculum_and_weights(
            prompts, before_penalties
        )
        if not config.dynamic_sampling:
            return drawn, metrics
        # A penalty makes no group worth training that the rewards left flat.
        live = (~before_penalties.by_group("flat")[:, 0]).nonzero()[:, 0].tolist()
        metrics |= {"groups/drawn": len(prompts), "groups/missing": max(0, wanted - len(live))}
        chosen = drawn.select_groups(live[:wanted])
        if not len(chosen):
            return chosen, metrics
        if config.scale_rewards in ("group", "mean", "none") and not (
            config.scales_parts or config.rescale_flat_groups or config.function
        ):
            return chosen, metrics  # also where a baseline is shared with prompts that are left out
        # Again, for a deviation of the batch is that of the groups that train.
        return self.with_advantages(chosen, clock), metrics

    def penalties(self, table: CompletionTable, clock: Clock) -> dict[str, Tensor]:
        """(S,) each: what is subtracted from the rewards for length and for KL."""
        penalties, limit = {}, self.config.rollout.max_completion_length
        if self.config.advantage.soft_overlong is not None:
            penalties[OVERLONG] = overlong_penalties(table, limit, self.config.advantage.soft_overlong)
        if self.config.loss.kl_in_reward:
            self.handover.to_trainer()
            with clock("logprobs"):
                penalties[KL] = self.update.kl_penalties(table)
        return penalties

    def rollout(self, prompts: Sequence[Prompt], draw: int, clock: Clock) -> CompletionTable:
        """Completions of each prompt, and what they earned."""
        own: list[CompletionTable] = []

        def work() -> dict[str, Tensor]:
            own.append(self.own_rollout(self.world.share(prompts), draw, clock))
            return own[0].tensors()

        tables = [*map(CompletionTable.from_tensors, self.world.gather_tensors("the rollout", work))]
        tables[self.world.rank] = own[0]
        context = self.stages[self.stage].context
        if self.world.size > 1 and (
            self.config.advantage.function or self.prompts.reads_texts or context is not None
        ):
            objects = self.world.gather_from_all("the completions", lambda: own[0].objects)
            tables = [replace(table, objects=found) for table, found in zip(tables, objects, strict=True)]
        joined = CompletionTable.join(tables)
        if any(prompt.images for prompt in prompts):  # which every rank has, and none need send
            images = tuple(prompts[group].images for group in joined.groups.tolist())
            joined = joined.with_objects(images=images)
        return joined if context is None else context.of(joined)

    def own_rollout(self, prompts: Sequence[Prompt], draw: int, clock: Clock) -> CompletionTable:
        """What this rank has of a rollout, or of the data's own completions."""
        if not self.on_policy:
            given = self.stages[self.stage].given
            with clock("reward"):
                return score(prompts, [[given[prompt.index]] for prompt in prompts], self.rewards)
        seed = self.world.seed(self.config.seed * SEEDS_PER_RUN + self.step * SEEDS_PER_STEP + draw)
        self.handover.to_engine()
        read = self.config.old_logprobs == "sampler" or self.config.loss.reads_sampler
        asked = read or self.step % COMPARE_EVERY == 0
        sampling = replace(self.sampling, seed=seed, logprobs=asked)
        n = self.config.rollout.num_generations
        weights = None if self.adaptive_weights is None else self.adaptive_weights.weights
        self.rewards.step, self.rewards.max_steps = self.step, self.run_steps
        with clock("generate"):
            completions, early = generate(
                self.engine,
                prompts,
                n,
                sampling,
                self.rewards,
                rollout=self.rollout_fn,
                progress=self.on_progress,
            )
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
        """Whether this step's completions are sampled: GKD, arXiv:2306.13649, algorithm 1."""
        drawn = random.Random(derive_seed(self.config.seed, self.step)).random()
        return drawn < self.config.rollout.on_policy_share

    def grouped(self, prompts: Sequence[Prompt], table: CompletionTable, clock: Clock) -> CompletionTable:
        """One draw's table with the fact `baseline_group` (S,) where prompts may share a baseline.

        The main rank forms the groups, since a user's function may give each rank another answer.
        """
        if not self.config.groups.shares_baselines:
            return table
        with clock("reward"):
            numbers = self.world.from_main("the groups", lambda: self.prompts.baseline_groups(prompts, table))
        return table.with_facts(**{BASELINE: torch.tensor(numbers)[table.groups]})

    def baselines(self, table: CompletionTable) -> list[int]:
        """For each prompt the number of its baseline; empty where no prompts share one."""
        if BASELINE not in table.facts:
            return []
        numbers = table.by_group(BASELINE)[:, 0].tolist()
        return with_enough(numbers, self.config.groups.min_group_size)

    def with_advantages(self, table: CompletionTable, clock: Clock) -> CompletionTable:
        """The table with its completions' advantages."""
        if self.config.loss.distills:
            return table.with_facts(advantage=torch.zeros(len(table)))
        with clock("reward"):
            baselines = self.baselines(table) or None
            return with_advantages(table, self.config.advantage, self.reward_weights, baselines)

    @property
    def reward_weights(self) -> tuple[float, ...]:
        """Of the reward functions, in force now."""
        return (self.adaptive_weights or self.rewards).weights

    def update_curriculum_and_weights(
        self, prompts: Sequence[Prompt], table: CompletionTable
    ) -> dict[str, float]:
        """Let the sampler and the reward weights learn from what was earned; their metrics are of before."""
        metrics = self.prompts.metrics(prompts, self.baselines(table), table)
        if len(self.stages) > 1:
            metrics["stage"] = self.stage
        self.prompts.observe(prompts, table.by_group("reward"), table.by_group("reward_table"))
        if self.adaptive_weights is not None:
            metrics |= self.adaptive_weights.metrics()
            self.adaptive_weights.update(table.by_group("reward_table"))
        return metrics

    def evaluate(self, size: int | None = None) -> Evaluation:
        """Score of the held-out prompts, or of the first `size` of them."""
        self.handover.to_engine()
        questions, watch = self.held_out[:size], RolloutWatch(self.on_progress)
        config, sampling = self.evaluation, self.evaluation_sampling
        self.eval_rewards.step, self.eval_rewards.max_steps = self.step, self.run_steps
        return evaluate(
            self.engine,
            questions,
            self.eval_rewards,
            config,
            sampling,
            world=self.world,
            rollout=self.eval_rollout_fn,
            observer=watch,
        )

    def pick_samples(self, table: CompletionTable, groups: int) -> list[SampleRecord]:
        """Every completion of the first group and the first of each other, for a person to read."""
        n = len(table) // max(1, table.num_groups)
        rows = [row for row in range(min(groups, table.num_groups) * n) if row < n or row % n == 0]

        def own() -> dict[int, SampleRecord]:
            here = table.objects.get("completion", ())
            return {row: self.sample(table, row) for row in rows if here[row] is not None}

        found: dict[int, SampleRecord] = {}
        for records in self.world.gather_from_all("the samples", own):
            found |= records
        return [found[row] for row in rows]

    def sample(self, table: CompletionTable, row: int) -> SampleRecord:
        """A completion of this rank."""
        facts = {name: values[row] for name, values in table.facts.items()} | {"parts": parts_of(table)[row]}
        objects = {name: values[row] for name, values in table.objects.items()}
        completion, asked = objects["completion"], objects["prompt"]
        return SampleRecord(
            group=int(table.groups[row]),
            question=asked.prompt,
            prompt=str(self.policy.tokenizer.decode(list(asked.token_ids))),
            completion=completion.text,
            rewards=dict(zip(self.parts, facts["parts"].tolist(), strict=True)),
            weights=self.parts,
            reward=facts["reward"].item(),
            advantage=facts["advantage"].item(),
            truncated=completion.truncated,
            num_tokens=completion.num_sampled,
            extra={name.removeprefix(EXTRA): v for name, v in objects.items() if name.startswith(EXTRA)},
            messages=None if completion.episode is None else completion.episode.messages,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; what a resumed run needs besides the weights and the optimizer."""
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
