"""The configuration: what a run is made of. YAML in, validated models out; nothing unknown is accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from grpo_fast.config.data import DatasetConfig, with_inherited
from grpo_fast.config.distributed import DistributedConfig
from grpo_fast.config.evaluation import EvaluationConfig
from grpo_fast.config.groups import AdaptiveWeightsConfig, AdvantageConfig, CurriculumConfig, GroupConfig
from grpo_fast.config.methods import MethodName, with_method
from grpo_fast.config.paths import user_path
from grpo_fast.config.policy import ModelConfig, OptimizerConfig, ReferenceConfig
from grpo_fast.config.preference import PreferenceConfig
from grpo_fast.config.record import AlertsConfig, CheckpointConfig, HubConfig, LoggingConfig
from grpo_fast.config.rewards import RewardConfig
from grpo_fast.config.rollout import MemoryConfig, RolloutConfig
from grpo_fast.config.section import FromMapping, Positive, PositiveInt, Section, Seed, at
from grpo_fast.config.stages import StageConfig, resolve_stages
from grpo_fast.objective.config import GRPOLossConfig, SamplerCorrection, refuse_unread

FEWEST_QUESTIONS = 30  # of an evaluation while training; the interval of fewer is wider than 35 points


def _path(text: str) -> str:
    """Raise ValueError for a text that stands for no path."""
    user_path(text, "output_dir")
    return text


def _with_held_out(settings: Any) -> Any:
    """Return the settings with what `evaluation.dataset` takes from `dataset`."""
    evaluation = settings.get("evaluation") if isinstance(settings, Mapping) else None
    if isinstance(evaluation, EvaluationConfig):
        evaluation = evaluation.model_dump(exclude_unset=True)
    if not isinstance(evaluation, Mapping) or evaluation.get("dataset") is None:
        return settings
    held_out = with_inherited(evaluation["dataset"], settings.get("dataset"))
    return {**settings, "evaluation": {**evaluation, "dataset": held_out}}


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
    output_dir: Annotated[str, AfterValidator(_path)] = Field("runs/default", description="the run's folder")
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
        "log-probabilities without LoRA's dropout (a forward only for minibatches after the first, and for "
        "it with such dropout and num_iterations > 1), or the sampler's (no forward, but its rounding is in "
        "the ratio, and in policy/ratio_* instead of sampling/*)",
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
    reference: ReferenceConfig = ReferenceConfig()
    dataset: DatasetConfig
    rewards: list[RewardConfig] = Field(
        [],
        description="what grpo maximises; at least one, or a rollout.environment with get_reward. "
        "loss_type opd needs none, and does not train on them",
    )
    rollout: RolloutConfig = RolloutConfig()
    memory: MemoryConfig = MemoryConfig()
    distributed: DistributedConfig = DistributedConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: Annotated[GRPOLossConfig, FromMapping()] = GRPOLossConfig()
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
        return with_method(_with_held_out(settings))

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        for section, names, why, is_unread in UNREAD:
            if is_unread(self):
                refuse_unread(
                    at(self, section) if section else self, names.split(), why.format(self), section
                )
        for message, is_so in CONTRADICTIONS:
            if is_so(self):
                raise ValueError(message.format(self))
        resolve_stages(self)
        return self

    @model_serializer(mode="wrap")
    def _without_unknown_steps(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Where epochs are given, max_steps is not known before the data is."""
        return {k: v for k, v in handler(self).items() if k != "max_steps" or self.epochs is None}

    @property
    def keeps_reference(self) -> bool:
        """Whether a run holds another model, or other weights, than those under training."""
        return self.loss.needs_reference and self.reference.weights == "loaded"

    def evaluation_schedule(self, questions: int) -> tuple[int, int | None]:
        """Return the steps between evaluations, 0 for none while training, and how many questions they use.

        Args:
            questions: how many are held out.
        """
        every, size = self.evaluation.every, self.evaluation.size
        if every is not None:
            return every, size
        every = -(-self.max_steps // 10)
        grpo = self.algorithm == "grpo"
        completions = every * self.prompts_per_step * (self.rollout.num_generations if grpo else 1)
        cheap = completions // (10 * self.evaluation.num_samples if grpo else 10)
        wanted = min(size or questions, questions)
        if wanted <= cheap:
            return every, size
        return (every, cheap) if size is None and cheap >= FEWEST_QUESTIONS else (0, None)

    def with_sampler(self, *, draws_with_policy: bool) -> TrainConfig:
        """Replace a null `loss.sampler_correction` by what this sampler needs.

        Args:
            draws_with_policy: whether the sampler's log-probabilities are the trainer's own.
        """
        loss = self.loss
        if loss.sampler_correction is not None or loss.is_custom or loss.distills:
            return self
        correction: SamplerCorrection = "token_truncate" if loss.weighs_sampler else "sequence_mask"
        if draws_with_policy or self.old_logprobs == "sampler" or self.rollout.truncations:
            correction = "none"
        return self.model_copy(update={"loss": replace(loss, sampler_correction=correction)})


def _scores(config: TrainConfig) -> bool:
    """Whether something rewards completions."""
    return bool(config.rewards or config.rollout.environment or config.dataset.is_taskset)


def _is_episode(config: TrainConfig) -> bool:
    """Whether a completion is more than what the engine samples in one turn."""
    return bool(config.rollout.has_turns or config.rollout.function or config.dataset.is_taskset)


# What a run would not read, and whose value the user would wait for: section, keys, why, and when. A method's
# own settings may go unread beside those that depart from it.
_BY_ALGORITHM = "by algorithm = {0.algorithm!r}"
_SAMPLING = (
    "method reference rewards rollout memory advantage loss groups curriculum adaptive_weights stages "
    "num_iterations minibatches old_logprobs"
)
_ESTIMATORS = "scale_rewards baseline multi_objective_aggregation"
_KL = "kl_estimator kl_in_reward use_bias_correction_kl"
_ADVANTAGES = (
    f"{_ESTIMATORS} rescale_flat_groups skip_flat_groups dynamic_sampling soft_overlong function max_draws"
)
_DISTILLS = "by loss.loss_type = {0.loss.loss_type!r}, which reads no advantages"
_ENTROPY = "entropy_target entropy_coef_min entropy_coef_max entropy_coef_delta"
UNREAD: list[tuple[str, str, str, Callable[[TrainConfig], object]]] = [
    ("", _SAMPLING, _BY_ALGORITHM, lambda c: c.algorithm != "grpo"),
    ("preference", "answers max_completion_length", _BY_ALGORITHM, lambda c: c.algorithm == "grpo"),
    ("model", "router_aux_loss", _BY_ALGORITHM, lambda c: c.algorithm != "grpo"),
    ("preference", "loss beta", _BY_ALGORITHM, lambda c: c.algorithm != "dpo"),
    ("preference", "ranking", _BY_ALGORITHM, lambda c: c.algorithm != "rank"),
    ("advantage", _ESTIMATORS, "beside advantage.function", lambda c: not c.method and c.advantage.function),
    ("", "groups adaptive_weights old_logprobs", _DISTILLS, lambda c: c.loss.distills),
    ("advantage", _ADVANTAGES, _DISTILLS, lambda c: c.loss.distills),
    ("loss", _KL, "without loss.beta, the weight of the KL", lambda c: not c.method and not c.loss.beta),
    (
        "loss",
        _ENTROPY,
        "without loss.use_adaptive_entropy",
        lambda c: not c.method and not c.loss.use_adaptive_entropy,
    ),
    (
        "loss",
        "max_completion_length",
        "but by aggregation = 'constant_length'",
        lambda c: not c.loss.reads_length,
    ),
]
CONTRADICTIONS: list[tuple[str, Callable[[TrainConfig], object]]] = [
    (
        "rewards all have weight = 0, so that no completion is better than another: give one a weight",
        lambda c: (
            c.rewards
            and not c.loss.distills
            and not (c.rollout.environment or any(reward.weight for reward in c.rewards))
        ),
    ),
    (
        "rewards is empty: give at least one, or a rollout.environment with a method get_reward",
        lambda c: c.algorithm == "grpo" and not (c.loss.distills or _scores(c)),
    ),
    (
        "rewards is empty, and curriculum and evaluation.dataset read scores: give a reward, which loss_type "
        "= {0.loss.loss_type!r} only logs, or leave them out",
        lambda c: c.loss.distills and not _scores(c) and (c.curriculum or c.evaluation.dataset),
    ),
    (
        "rollout.on_policy_share = {0.rollout.on_policy_share:g} trains on given completions, which "
        "loss.loss_type = opd alone does, without rollout.tools, environment or function: "
        "leave it out, or set method = gkd",
        lambda c: c.rollout.on_policy_share < 1 and (not c.loss.distills or _is_episode(c)),
    ),
    (
        "reference.prompt_template is of completions of one turn, on ranks that each hold the model: leave "
        "it out, or rollout.tools, environment and function, and distributed.mode = shard",
        lambda c: c.reference.prompt_template and (_is_episode(c) or c.distributed.mode == "shard"),
    ),
    (
        "reference.prompt_template has {{solution}} or {{feedback}}, which rewards give: give at least one "
        "reward",
        lambda c: {"solution", "feedback"} & {*c.reference.fields} and not c.rewards,
    ),
    (
        "reference.prompt_template has {{solution}}, another completion of the prompt: raise "
        "rollout.num_generations = {0.rollout.num_generations} to 2 or more, and leave out on_policy_share",
        lambda c: (
            "solution" in c.reference.fields
            and (c.rollout.num_generations == 1 or c.rollout.on_policy_share < 1)
        ),
    ),
    (
        "rollout.num_generations = 1 leaves nothing to compare a completion with: raise it to 2 or more",
        lambda c: c.algorithm == "grpo" and c.rollout.num_generations == 1 and not c.loss.distills,
    ),
    (
        "rollout.router_replay = true: `verifiers:` does not hand on which experts were chosen, and compiled "
        "layers do not look; set model.compile to false, or leave router_replay out",
        lambda c: c.rollout.router_replay and (c.model.compile is True or c.dataset.is_taskset),
    ),
    (
        "dataset.overlong_prompts = 'truncate' keeps a prompt's end, and what it says of tools is at its "
        "beginning; leave it out, or rollout.tools and rollout.environment",
        lambda c: c.rollout.has_turns and c.dataset.overlong_prompts == "truncate",
    ),
    (
        "minibatches = {0.minibatches} exceeds prompts_per_step = {0.prompts_per_step}: a group is never "
        "split over optimiser steps; lower minibatches or raise prompts_per_step",
        lambda c: c.minibatches > c.prompts_per_step,
    ),
    (
        "old_logprobs = 'sampler' makes the loss's ratio that to the sampler: loss.sampler_correction = "
        "{0.loss.sampler_correction!r} has nothing to correct; set it to 'none', or old_logprobs to "
        "'recompute'",
        lambda c: c.old_logprobs == "sampler" and c.loss.needs_sampler,
    ),
    (
        "old_logprobs = {0.old_logprobs!r} and loss.sampler_correction = {0.loss.sampler_correction!r} take "
        "ratios to the sampler, which rollout.top_p = {0.rollout.top_p}, rollout.top_k = {0.rollout.top_k} "
        "or rollout.min_p = {0.rollout.min_p} would bias; leave out one or the others",
        lambda c: (c.old_logprobs == "sampler" or c.loss.needs_sampler) and c.rollout.truncations,
    ),
    (
        "curriculum and groups.strategy = {0.groups.strategy!r} both decide which prompts come together; "
        "keep one of them, or give them to different stages",
        lambda c: c.curriculum and c.groups.shares_baselines,
    ),
    (
        "prompts_per_step = {0.prompts_per_step} cannot fill groups.max_group_size = "
        "{0.groups.max_group_size} or groups.size_by = {0.groups.size_by}: lower the group size, or raise "
        "prompts_per_step",
        lambda c: c.groups.largest > c.prompts_per_step,
    ),
    (
        "loss.loss_type = {0.loss.loss_type!r} has no teacher: set reference.path to a model, or "
        "reference.prompt_template to what the policy reads as its own teacher",
        lambda c: c.loss.distills and not (c.reference.path or c.reference.prompt_template),
    ),
    (
        "loss.kl_in_reward = true is a part of the reward, whose weight loss.beta is lost where "
        "advantage.multi_objective_aggregation = 'normalize_then_sum' gives each part one deviation: set "
        "kl_in_reward to false for a KL in the loss, or the aggregation to sum_then_normalize",
        lambda c: c.advantage.scales_parts and c.loss.beta and c.loss.kl_in_reward,
    ),
    (
        "optimizer.stochastic_rounding = true rounds weights to bfloat16, and model.dtype = "
        "{0.model.dtype!r}; leave it out, or set model.dtype to bfloat16",
        lambda c: c.optimizer.stochastic_rounding and c.model.dtype not in ("auto", "bfloat16"),
    ),
    (
        "optimizer.warmup_steps = {0.optimizer.warmup_steps} leaves no step of max_steps = {0.max_steps} at "
        "the full rate; lower it, or give warmup_ratio, a share of max_steps",
        lambda c: c.epochs is None and c.optimizer.warmup_steps >= c.max_steps,
    ),
    (
        "optimizer.warmup_steps = {0.optimizer.warmup_steps} is a share of the run, which needs max_steps or "
        "epochs beside it; set it as a number of steps",
        lambda c: c.epochs is None and 0 < c.optimizer.warmup_steps < 1,
    ),
    (
        "epochs = {0.epochs:g} says how long the run is: max_steps, stages, curriculum and "
        "advantage.dynamic_sampling say it otherwise; leave out one or the others",
        lambda c: (
            c.epochs
            and (
                "max_steps" in c.model_fields_set or c.stages or c.curriculum or c.advantage.dynamic_sampling
            )
        ),
    ),
]
