"""The configuration: what a run is made of. YAML in, validated models out; nothing unknown is accepted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_fast.data.config import DatasetConfig
from grpo_fast.evaluate import EvaluationConfig
from grpo_fast.groups.config import AdaptiveWeightsConfig, AdvantageConfig, CurriculumConfig, GroupConfig
from grpo_fast.objective.catalog import GRPOLossConfig
from grpo_fast.policy.config import ModelConfig, OptimizerConfig
from grpo_fast.preference.config import PreferenceConfig
from grpo_fast.rewards.config import RewardConfig
from grpo_fast.rollout.config import MemoryConfig, RolloutConfig
from grpo_fast.run_record.alerts import AlertsConfig
from grpo_fast.run_record.config import CheckpointConfig, HubConfig
from grpo_fast.run_record.mirrors import LoggingConfig
from grpo_fast.section import PositiveInt, Section, Seed
from grpo_fast.stages import StageConfig, resolve_stages

# What only training on the policy's own completions reads.
_SAMPLING = (
    *("rewards", "rollout", "memory", "advantage", "loss"),
    *("num_iterations", "minibatches", "old_logprobs"),
    *("groups", "curriculum", "adaptive_weights", "stages"),
    *(f"evaluation.{key}" for key in ("num_samples", "temperature", "threshold", "reward")),
    *(f"logging.{key}" for key in ("samples_every", "samples", "show_samples")),
)


class TrainConfig(Section):
    """A whole run. `grpo-fast train --print-config` prints one."""

    algorithm: Literal["grpo", "dpo", "rank"] = Field(
        "grpo", description="dpo: preference pairs; rank: ranked groups; both on fixed completions"
    )
    output_dir: str = Field("runs/default", description="the run's folder")
    seed: Seed = Field(0, description="of prompts, completions and new weights; a CPU run repeats exactly")
    max_steps: PositiveInt = Field(
        100, description="steps: a rollout and its updates, or a batch of comparisons"
    )
    prompts_per_step: PositiveInt = Field(
        16, description="prompts of a rollout, or of a batch of comparisons"
    )
    num_iterations: PositiveInt = Field(1, description="epochs over one rollout")
    minibatches: PositiveInt = Field(1, description="optimiser steps in one epoch")
    old_logprobs: Literal["recompute", "sampler"] = Field(
        "recompute",
        description="what the ratio of several optimiser steps on one rollout is against: the trainer's own "
        "log-probabilities (a forward only for minibatches after the first), or the sampler's (no forward, "
        "but its rounding is in the ratio, and in policy/ratio_* instead of sampling/*)",
    )
    micro_batch_tokens: PositiveInt = Field(
        16384, description="tokens of one forward and backward; halved when the memory does not hold them"
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="threads of the CPU; null: torch's choice"
    )
    model: ModelConfig
    dataset: DatasetConfig
    rewards: list[RewardConfig] = Field([], description="what grpo maximises; at least one")
    rollout: RolloutConfig = RolloutConfig()
    memory: MemoryConfig = MemoryConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: GRPOLossConfig = GRPOLossConfig()
    preference: PreferenceConfig = PreferenceConfig()
    groups: GroupConfig = GroupConfig()
    curriculum: CurriculumConfig | None = Field(None, description="draw prompts by difficulty")
    adaptive_weights: AdaptiveWeightsConfig | None = Field(None, description="let the rewards' weights move")
    stages: list[StageConfig] = Field([], description="in order; what they leave is as here")
    optimizer: OptimizerConfig = OptimizerConfig()
    alerts: AlertsConfig = AlertsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    callbacks: list[str] = Field(
        [], description="`module:Class` or `path/to/file.py:Class`, derived from grpo_fast.Callback"
    )
    hub: HubConfig | None = Field(None, description="where the trained model is pushed to")

    @model_validator(mode="after")
    def _of_one_algorithm(self) -> TrainConfig:
        if self.algorithm == "grpo" and not self.rewards:
            raise ValueError("rewards is empty: algorithm = 'grpo' maximises them; give at least one")
        unread = {
            "grpo": ("preference",),
            "dpo": (*_SAMPLING, "preference.ranking"),
            "rank": (*_SAMPLING, "preference.loss", "preference.beta"),
        }
        for name in unread[self.algorithm]:
            section, _, key = name.partition(".")
            value, default = getattr(self, section), type(self).model_fields[section].get_default()
            if key:
                value, default = getattr(value, key), getattr(default, key)
            if value != default:
                raise ValueError(f"{name} is not read by algorithm = {self.algorithm!r}; leave it out")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.minibatches > self.prompts_per_step:
            raise ValueError(
                f"minibatches = {self.minibatches} exceeds prompts_per_step = {self.prompts_per_step}: a "
                "group is never split over optimiser steps; lower minibatches or raise prompts_per_step"
            )
        if self.old_logprobs == "sampler" and self.loss.sampler_correction != "none":
            raise ValueError(
                "old_logprobs = 'sampler' makes the loss's ratio that to the sampler: nothing is left for "
                f"loss.sampler_correction = {self.loss.sampler_correction!r} to correct; set it to 'none' "
                "(loss.delta bounds the ratio on both sides), or old_logprobs to 'recompute'"
            )
        if self.curriculum is not None and self.groups.shares_baselines:
            raise ValueError(
                f"curriculum and groups.strategy = {self.groups.strategy!r} both decide which prompts come "
                "together; keep one of them, or give them to different stages"
            )
        if self.optimizer.warmup_steps >= self.max_steps:
            raise ValueError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} leaves no step of max_steps = "
                f"{self.max_steps} at the full rate; lower it"
            )
        if self.stages:
            resolve_stages(self)
        return self
