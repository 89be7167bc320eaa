"""The configuration: what a run is made of. YAML in, validated models out; nothing unknown is accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from grpo_fast.config.data import VERIFIERS, DatasetConfig
from grpo_fast.config.distributed import DistributedConfig
from grpo_fast.config.evaluation import EvaluationConfig
from grpo_fast.config.groups import AdaptiveWeightsConfig, AdvantageConfig, CurriculumConfig, GroupConfig
from grpo_fast.config.methods import MethodName, comes_from_method, with_method
from grpo_fast.config.policy import ModelConfig, OptimizerConfig
from grpo_fast.config.preference import PreferenceConfig
from grpo_fast.config.record import AlertsConfig, CheckpointConfig, HubConfig, LoggingConfig
from grpo_fast.config.rewards import RewardConfig
from grpo_fast.config.rollout import MemoryConfig, RolloutConfig, VLLMConfig
from grpo_fast.config.section import Positive, PositiveInt, Section, Seed
from grpo_fast.config.stages import PARTIAL, StageConfig, resolve_stages
from grpo_fast.objective.config import GRPOLossConfig, SamplerCorrection

_OF_ANY_TRAINING = ("window", "clear_margin", "divergence", "kl")
# What only training on the policy's own completions reads.
_SAMPLING = (
    *("method", "rewards", "rollout", "memory", "advantage", "loss"),
    *("num_iterations", "minibatches", "old_logprobs"),
    *("groups", "curriculum", "adaptive_weights", "stages"),
    *(f"evaluation.{key}" for key in ("num_samples", "temperature", "threshold", "reward")),
    *(f"logging.{key}" for key in ("samples_every", "samples", "show_samples")),
    *(f"alerts.{key}" for key in AlertsConfig.model_fields if key not in _OF_ANY_TRAINING),
)


class TrainConfig(Section):
    """A whole run. `grpo-fast train --print-config` prints one."""

    algorithm: Literal["grpo", "dpo", "rank"] = Field(
        "grpo", description="dpo: preference pairs; rank: ranked groups; both on fixed completions"
    )
    method: MethodName | None = Field(
        None,
        description="what its paper sets in `loss` and `advantage`, below what is set there: a name of "
        "docs/methods.md; null: nothing, and loss.loss_type names a surrogate alone",
    )
    output_dir: str = Field("runs/default", description="the run's folder")
    seed: Seed = Field(0, description="of prompts, completions and new weights; a CPU run repeats exactly")
    max_steps: PositiveInt = Field(
        100, description="steps: a rollout and its updates, or a batch of comparisons"
    )
    epochs: Positive | None = Field(
        None,
        description="how often each prompt comes, in place of max_steps: becomes steps when the data is read",
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
    micro_batch_tokens: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="tokens of one forward and backward; halved when the memory does not hold them; auto: on "
        "a GPU by the plan, elsewhere and without rollouts 16,384",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="threads of the CPU; null: torch's choice"
    )
    model: ModelConfig
    dataset: DatasetConfig
    rewards: list[RewardConfig] = Field(
        [], description="what grpo maximises; at least one, or a rollout.environment with get_reward"
    )
    rollout: RolloutConfig = RolloutConfig()
    memory: MemoryConfig = MemoryConfig()
    distributed: DistributedConfig = DistributedConfig()
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

    @model_validator(mode="before")
    @classmethod
    def _over_its_method(cls, settings: Any) -> Any:
        return with_method(settings)

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        plays = self.rollout.environment is not None or self.dataset.source.startswith(VERIFIERS)
        if self.algorithm == "grpo" and not self.rewards and not plays:
            raise ValueError(
                "rewards is empty: algorithm = 'grpo' maximises them; give at least one, or a "
                "rollout.environment with a method get_reward"
            )
        if self.rollout.router_replay and self.dataset.source.startswith(VERIFIERS):
            raise ValueError(
                f"rollout.router_replay = true: dataset.source = {self.dataset.source!r} does not hand on "
                "which experts were chosen; leave it out"
            )
        if self.rollout.router_replay and self.model.compile is True:
            raise ValueError(
                "rollout.router_replay = true gives a router its experts while it runs, where compiled "
                "layers do not look; set model.compile to false"
            )
        if self.rollout.has_turns and self.dataset.overlong_prompts == "truncate":
            raise ValueError(
                "dataset.overlong_prompts = 'truncate' keeps a prompt's end, and what it says of tools is at "
                "its beginning; leave it out, or rollout.tools and rollout.environment"
            )
        if self.minibatches > self.prompts_per_step:
            raise ValueError(
                f"minibatches = {self.minibatches} exceeds prompts_per_step = {self.prompts_per_step}: a "
                "group is never split over optimiser steps; lower minibatches or raise prompts_per_step"
            )
        if self.old_logprobs == "sampler" and self.loss.needs_sampler:
            raise ValueError(
                "old_logprobs = 'sampler' makes the loss's ratio that to the sampler: nothing is left for "
                f"loss.sampler_correction = {self.loss.sampler_correction!r} to correct; set it to 'none' "
                "(loss.delta bounds the ratio on both sides), or old_logprobs to 'recompute'"
            )
        reader = "old_logprobs" if self.old_logprobs == "sampler" else "loss.sampler_correction"
        if at(self, reader) not in (None, "recompute", "none") and self.rollout.truncations:
            cut = " and ".join(f"rollout.{key} = {value}" for key, value in self.rollout.truncations.items())
            raise ValueError(
                f"{reader} = {at(self, reader)!r} takes ratios to the sampler, and {cut} would bias each of "
                "them: what is drawn is then of a truncated distribution; leave out one or the other"
            )
        if self.curriculum is not None and self.groups.shares_baselines:
            raise ValueError(
                f"curriculum and groups.strategy = {self.groups.strategy!r} both decide which prompts come "
                "together; keep one of them, or give them to different stages"
            )
        if self.optimizer.stochastic_rounding and self.model.dtype not in ("auto", "bfloat16"):
            raise ValueError(
                "optimizer.stochastic_rounding = true rounds weights to bfloat16, and model.dtype = "
                f"{self.model.dtype!r}; leave it out, or set model.dtype to bfloat16"
            )
        if self.epochs is not None:
            if "max_steps" in self.model_fields_set:
                raise ValueError(
                    f"epochs = {self.epochs:g} and max_steps = {self.max_steps} both say how long the run "
                    "is; keep one of them"
                )
            others = {"stages": self.stages, "curriculum": self.curriculum is not None}
            others["advantage.dynamic_sampling"] = self.advantage.dynamic_sampling
            if found := next((key for key, is_set in others.items() if is_set), None):
                raise ValueError(
                    f"epochs = {self.epochs:g} counts how often each prompt comes, which {found} leaves "
                    "open; set max_steps"
                )
        elif self.optimizer.warmup_steps >= self.max_steps:
            raise ValueError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} leaves no step of max_steps = "
                f"{self.max_steps} at the full rate; lower it, or give warmup_ratio, a share of max_steps"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unknown_steps(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Where epochs are given, max_steps is not known before the data is."""
        return {k: v for k, v in handler(self).items() if k != "max_steps" or self.epochs is None}

    def with_sampler(self, *, draws_with_policy: bool) -> TrainConfig:
        """Replace a null `loss.sampler_correction` by what this sampler needs.

        Args:
            draws_with_policy: whether the sampler's log-probabilities are the trainer's own.
        """
        loss = self.loss
        if loss.sampler_correction is not None or loss.is_custom:
            return self
        correction: SamplerCorrection = "token_truncate" if loss.weighs_sampler else "sequence_mask"
        if draws_with_policy or self.old_logprobs == "sampler" or self.rollout.truncations:
            correction = "none"
        return self.model_copy(update={"loss": replace(loss, sampler_correction=correction)})

    @model_validator(mode="after")
    def _ignores_nothing(self, info: ValidationInfo) -> TrainConfig:
        if info.context == PARTIAL:
            return self
        errors = [
            InitErrorDetails(
                type=PydanticCustomError("ignored", "is not read {why}; leave it out", {"why": why}),
                loc=tuple(name.split(".")),
                input=value,
            )
            for name, (value, why) in ignored_keys(self).items()
            if not comes_from_method(self, name)
        ]
        if errors:
            raise ValidationError.from_exception_data(type(self).__name__, errors)
        return self


# Keys, when they are read, and when they are not.
Condition = tuple[tuple[str, ...], Callable[[TrainConfig], object], str]
_BY_ALGORITHM = "by algorithm = {0.algorithm!r}"
_BY_STRATEGY = "by groups.strategy = {0.groups.strategy!r}"
_DATASETS = ("dataset", "evaluation.dataset")


def _by_source(place: str, key: str) -> Condition:
    why = f"with {place}.source = {{0.{place}.source!r}}"
    return (f"{place}.{key}",), lambda config: key not in at(config, place).idle_keys, why


def _with_limit(place: str) -> Condition:
    limit = f"{place}.max_prompt_length"
    return (f"{place}.overlong_prompts",), lambda config: at(config, limit), f"without {limit}"


KEY_CONDITIONS: list[Condition] = [
    (_SAMPLING, lambda c: c.algorithm == "grpo", _BY_ALGORITHM),
    (("model.router_aux_loss",), lambda c: c.algorithm == "grpo", _BY_ALGORITHM),
    (("preference.loss", "preference.beta"), lambda c: c.algorithm == "dpo", _BY_ALGORITHM),
    (("preference.ranking",), lambda c: c.algorithm == "rank", _BY_ALGORITHM),
    (
        ("preference.answers", "preference.max_completion_length", "preference.reference_cache"),
        lambda c: c.algorithm != "grpo",
        _BY_ALGORITHM,
    ),
    (
        ("preference.beta.gap_smoothing",),
        lambda c: c.preference.beta.gap_gain,
        "without preference.beta.gap_gain",
    ),
    (
        ("groups.similarity_threshold", "groups.embedding"),
        lambda c: c.groups.strategy in ("similarity", "combined"),
        _BY_STRATEGY,
    ),
    (("groups.prefix_turns",), lambda c: c.groups.strategy in ("prefix", "combined"), _BY_STRATEGY),
    (("groups.criteria",), lambda c: c.groups.strategy == "combined", _BY_STRATEGY),
    (("groups.min_group_size", "groups.max_group_size"), lambda c: c.groups.shares_baselines, _BY_STRATEGY),
    *(_by_source(place, key) for place in _DATASETS for key in ("name", "split", "seed", "options")),
    *map(_with_limit, _DATASETS),
    (
        ("model.revision",),
        lambda c: not (c.model.path.startswith("package:") or Path(c.model.path).expanduser().is_dir()),
        "with model.path = {0.model.path!r}, which is no hub id",
    ),
    (
        tuple(f"rollout.vllm.{key}" for key in VLLMConfig.model_fields),
        lambda c: c.rollout.engine != "transformers",
        "by rollout.engine = {0.rollout.engine!r}",
    ),
    (
        ("rollout.max_batch_tokens",),
        lambda c: c.rollout.engine != "vllm",
        "by rollout.engine = {0.rollout.engine!r}; rollout.vllm.kv_cache_gib bounds its memory",
    ),
    (("rollout.vllm.lora_sync",), lambda c: c.model.lora, "without model.lora"),
    (("advantage.max_draws",), lambda c: c.advantage.dynamic_sampling, "without advantage.dynamic_sampling"),
    (
        tuple(f"advantage.{key}" for key in ("scale_rewards", "baseline", "multi_objective_aggregation")),
        lambda c: c.advantage.function is None,
        "beside advantage.function, which gives the advantages",
    ),
    (
        ("loss.kl_estimator", "loss.kl_in_reward", "loss.use_bias_correction_kl"),
        lambda c: c.loss.beta,
        "without loss.beta, the weight of the KL",
    ),
    (
        ("loss.entropy_target", "loss.entropy_coef_min", "loss.entropy_coef_max", "loss.entropy_coef_delta"),
        lambda c: c.loss.use_adaptive_entropy,
        "without loss.use_adaptive_entropy",
    ),
    (
        ("loss.sampler_clip_min", "loss.sampler_clip_max"),
        lambda c: c.rollout.engine != "transformers" or c.loss.needs_sampler,
        "without loss.sampler_correction",
    ),
    (
        ("loss.max_completion_length",),
        lambda c: c.loss.is_custom or c.loss.aggregation_kind == "constant_length",
        "by loss.loss_type = {0.loss.loss_type!r} without aggregation = 'constant_length'",
    ),
    (
        ("optimizer.min_learning_rate_ratio",),
        lambda c: c.optimizer.schedule != "constant",
        "by optimizer.schedule = 'constant'",
    ),
    (
        (
            *("evaluation.every", "evaluation.size", "evaluation.num_samples"),
            *("alerts.reward_rise", "alerts.held_out_drop", "alerts.evaluation_truncated"),
        ),
        lambda c: c.evaluation.dataset,
        "without evaluation.dataset",
    ),
    (
        ("evaluation.size",),
        lambda c: c.evaluation.every,
        "without evaluation.every: before and after training all questions are used",
    ),
    (("logging.samples",), lambda c: c.logging.samples_every, "with logging.samples_every = 0"),
    (
        ("logging.project",),
        lambda c: c.logging.wandb or c.logging.trackio,
        "without logging.wandb or logging.trackio",
    ),
]


def ignored_keys(config: TrainConfig) -> dict[str, tuple[Any, str]]:
    """Keys that are set and that no stage of the run reads: what they ask for, and why it is not read."""
    found: dict[str, tuple[Any, str]] = {}
    read: set[str] = set()
    for stage in resolve_stages(config):
        changed = {name for names, _, _ in KEY_CONDITIONS for name in names if _is_set(stage.config, name)}
        chosen = stage.config.model_dump(exclude_defaults=True)
        idle = {
            name: (reduce(getitem, name.split("."), chosen), why.format(stage.config))
            for names, reads, why in reversed(KEY_CONDITIONS)  # the first reason stays
            for name in names
            if name in changed and not reads(stage.config)
        }
        found |= idle
        read |= changed - idle.keys()
    return {name: reason for name, reason in found.items() if name not in read}


def at(config: Any, name: str) -> Any:
    """The value of a dotted key; None within a section that is not there."""
    return reduce(lambda section, key: getattr(section, key, None), name.split("."), config)


def _is_set(config: TrainConfig, name: str) -> bool:
    """Whether a key asks for something else than its default; null asks for nothing."""
    place, _, key = name.rpartition(".")
    section = at(config, place) if place else config
    fields: Any = getattr(type(section), "model_fields", None) or getattr(section, "__dataclass_fields__", {})
    return key in fields and getattr(section, key) not in (fields[key].default, None)
