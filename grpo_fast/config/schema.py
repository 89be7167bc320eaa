"""The configuration of a run: `TrainConfig`, and the conditions between its sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

FEWEST_QUESTIONS = 30  # of an evaluation during training; the interval of fewer is wider than 35 points


def _path(text: str) -> str:
    user_path(text, "output_dir")  # raises ValueError
    return text


def _with_held_out(settings: Any) -> Any:
    """Return the settings with what `evaluation.dataset` inherits from `dataset`."""
    evaluation = settings.get("evaluation") if isinstance(settings, Mapping) else None
    if isinstance(evaluation, EvaluationConfig):
        evaluation = evaluation.model_dump(exclude_unset=True)
    if not isinstance(evaluation, Mapping) or evaluation.get("dataset") is None:
        return settings
    held_out = with_inherited(evaluation["dataset"], settings.get("dataset"))
    return {**settings, "evaluation": {**evaluation, "dataset": held_out}}


class TrainConfig(Section):
    """The configuration of a run. `grpo-fast train --print-config` prints it."""

    algorithm: Literal["grpo", "dpo", "rank"] = Field(
        "grpo", description="dpo: preference pairs; rank: ranked groups; both train on fixed completions"
    )
    method: MethodName | None = Field(
        None,
        description="preset of loss and advantages, a name of docs/methods.md; keys that are set override "
        "it; null: none, and loss.loss_type sets the policy loss alone",
    )
    output_dir: Annotated[str, AfterValidator(_path)] = Field("runs/default", description="the run's folder")
    seed: Seed = Field(0, description="of prompts, completions and new weights; a CPU run is reproducible")
    max_steps: PositiveInt = Field(100, description="steps, each a rollout and its updates or one batch")
    epochs: Positive | None = Field(None, description="passes over the prompts, in place of max_steps")
    prompts_per_step: PositiveInt = Field(16, description="prompts of a rollout, or a batch of comparisons")
    num_iterations: PositiveInt = Field(1, description="epochs over one rollout")
    minibatches: PositiveInt = Field(1, description="optimizer steps in one epoch over a rollout")
    old_logprobs: Literal["recompute", "sampler"] = Field(
        "recompute",
        description="the old log-probabilities in the ratio of several optimizer steps on one rollout. "
        "recompute: the trainer's, without LoRA dropout; costs a forward where weights or dropout changed "
        "them; sampler: the rollout engine's; no forward, but its rounding is in the ratio and in "
        "policy/ratio_*",
    )
    micro_batch_tokens: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="tokens of one forward and backward pass; halved when memory runs out; auto: on a GPU by "
        "the plan, else 16,384",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="CPU threads; null: torch's"
    )
    model: ModelConfig
    reference: ReferenceConfig = ReferenceConfig()
    dataset: DatasetConfig
    rewards: list[RewardConfig] = Field(
        [],
        description="at least one for grpo, or a rollout.environment with get_reward; none for loss_type opd",
    )
    rollout: RolloutConfig = RolloutConfig()
    memory: MemoryConfig = MemoryConfig()
    distributed: DistributedConfig = DistributedConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: Annotated[GRPOLossConfig, FromMapping()] = GRPOLossConfig()
    preference: PreferenceConfig = PreferenceConfig()
    groups: GroupConfig = GroupConfig()
    curriculum: CurriculumConfig | None = Field(None, description="sample prompts by difficulty")
    adaptive_weights: AdaptiveWeightsConfig | None = Field(None, description="change rewards' weights")
    stages: list[StageConfig] = Field([], description="stages of the run, in order")
    optimizer: OptimizerConfig = OptimizerConfig()
    alerts: AlertsConfig = AlertsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    callbacks: list[str] = Field(
        [], description="subclasses of grpo_fast.Callback, `module:Class` or `file.py:Class`"
    )
    hub: HubConfig | None = Field(None, description="push the trained model to the hub")

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
        for message in _contradictions(self):
            raise ValueError(message)
        resolve_stages(self)
        return self

    @model_serializer(mode="wrap")
    def _without_unknown_steps(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """With epochs, max_steps is not known before the data is read."""
        return {k: v for k, v in handler(self).items() if k != "max_steps" or self.epochs is None}

    @property
    def keeps_reference(self) -> bool:
        """Whether a run holds weights of a reference."""
        return self.loss.needs_reference and self.reference.weights == "loaded"

    def evaluation_schedule(self, questions: int) -> tuple[int, int | None]:
        """Return the steps between evaluations, 0 for none during training, and their number of questions.

        Args:
            questions: the number of held-out questions.
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
        """Replace a null `loss.sampler_correction` by the default for a rollout engine.

        Args:
            draws_with_policy: whether the engine's log-probabilities are the trainer's.
        """
        loss = self.loss
        if loss.sampler_correction is not None or loss.is_custom or loss.distills:
            return self
        correction: SamplerCorrection = "token_truncate" if loss.weighs_sampler else "sequence_mask"
        if draws_with_policy or self.old_logprobs == "sampler" or self.rollout.truncations:
            correction = "none"
        return self.model_copy(update={"loss": replace(loss, sampler_correction=correction)})


def _scores(config: TrainConfig) -> bool:
    """Whether completions get a reward."""
    return bool(config.rewards or config.rollout.environment or config.dataset.is_taskset)


def _is_episode(config: TrainConfig) -> bool:
    """Whether a completion may be more than one sampled turn."""
    return bool(config.rollout.has_turns or config.rollout.function or config.dataset.is_taskset)


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
_ADAPTIVE = "loss.use_adaptive_entropy"
# Keys without effect: section, keys, why, and when. A method's own settings may be without effect.
UNREAD: list[tuple[str, str, str, Callable[[TrainConfig], object]]] = [
    ("", _SAMPLING, _BY_ALGORITHM, lambda c: c.algorithm != "grpo"),
    ("preference", "answers max_completion_length", _BY_ALGORITHM, lambda c: c.algorithm == "grpo"),
    ("model", "router_aux_loss", _BY_ALGORITHM, lambda c: c.algorithm != "grpo"),
    ("preference", "loss beta", _BY_ALGORITHM, lambda c: c.algorithm != "dpo"),
    ("preference", "ranking", _BY_ALGORITHM, lambda c: c.algorithm != "rank"),
    ("advantage", _ESTIMATORS, "with advantage.function", lambda c: not c.method and c.advantage.function),
    ("", "groups adaptive_weights old_logprobs", _DISTILLS, lambda c: c.loss.distills),
    ("advantage", _ADVANTAGES, _DISTILLS, lambda c: c.loss.distills),
    ("loss", _KL, "without loss.beta, the weight of the KL", lambda c: not c.method and not c.loss.beta),
    ("loss", _ENTROPY, f"without {_ADAPTIVE}", lambda c: not c.method and not c.loss.use_adaptive_entropy),
    ("loss", "max_completion_length", "without constant_length", lambda c: not c.loss.reads_length),
]


def _contradictions(c: TrainConfig) -> Iterator[str]:
    """Yield what contradicts each other, with the remedy."""
    rollout, loss, template = c.rollout, c.loss, c.reference.prompt_template
    weights = [reward.weight for reward in c.rewards]
    ratios = c.old_logprobs == "sampler" or loss.needs_sampler
    if weights and not any(weights) and not (loss.distills or rollout.environment):
        yield "rewards all have weight = 0, so all completions are equal: give one a weight"
    if c.algorithm == "grpo" and not (loss.distills or _scores(c)):
        yield "rewards is empty: give at least one, or a rollout.environment with a method get_reward"
    if loss.distills and not _scores(c) and (c.curriculum or c.evaluation.dataset):
        yield "rewards is empty, and curriculum and evaluation.dataset need one: give one, or leave them out"
    if rollout.on_policy_share < 1 and (not loss.distills or _is_episode(c)):
        yield (
            f"rollout.on_policy_share = {rollout.on_policy_share:g} needs loss.loss_type = opd, without "
            "rollout.tools, environment or function: leave it out, or set method = gkd"
        )
    if template and (_is_episode(c) or c.distributed.mode == "shard"):
        yield (
            "reference.prompt_template needs completions of one turn, and whole weights on each rank: leave "
            "it out, or rollout.tools, environment and function, and distributed.mode = shard"
        )
    if {"solution", "feedback"} & {*c.reference.fields} and not c.rewards:
        yield "reference.prompt_template has {solution} or {feedback} of a reward: give at least one reward"
    if "solution" in c.reference.fields and (rollout.num_generations == 1 or rollout.on_policy_share < 1):
        yield (
            "reference.prompt_template has {solution}, another completion of the prompt: raise "
            f"rollout.num_generations = {rollout.num_generations} to 2 or more, and leave out on_policy_share"
        )
    if c.algorithm == "grpo" and rollout.num_generations == 1 and not loss.distills:
        yield "rollout.num_generations = 1 leaves nothing to compare a completion with: raise it to 2 or more"
    if rollout.router_replay and (c.model.compile is True or c.dataset.is_taskset):
        yield (
            "rollout.router_replay = true needs the routed experts, which `verifiers:` does not return and "
            "compiled layers do not record: set model.compile to false, or leave router_replay out"
        )
    if rollout.has_turns and c.dataset.overlong_prompts == "truncate":
        yield (
            "dataset.overlong_prompts = 'truncate' would cut the tools' descriptions from a prompt's "
            "beginning; leave it out, or rollout.tools and rollout.environment"
        )
    if c.minibatches > c.prompts_per_step:
        yield (
            f"minibatches = {c.minibatches} exceeds prompts_per_step = {c.prompts_per_step}: a group is "
            "never split over optimizer steps; lower minibatches or raise prompts_per_step"
        )
    if c.old_logprobs == "sampler" and loss.needs_sampler:
        yield (
            f"loss.sampler_correction = {loss.sampler_correction!r} has no effect with old_logprobs = "
            "'sampler': set it to 'none', or old_logprobs to 'recompute'"
        )
    if ratios and rollout.truncations:
        yield (
            f"old_logprobs = {c.old_logprobs!r} and loss.sampler_correction = {loss.sampler_correction!r} "
            f"use ratios to the rollout engine, which rollout.top_p = {rollout.top_p}, rollout.top_k = "
            f"{rollout.top_k} or rollout.min_p = {rollout.min_p} would bias: leave out one or the others"
        )
    if c.curriculum and c.groups.shares_baselines:
        yield (
            f"curriculum and groups.strategy = {c.groups.strategy!r} both choose the prompts of a step: keep "
            "one, or use different stages"
        )
    if c.groups.largest > c.prompts_per_step:
        yield (
            f"prompts_per_step = {c.prompts_per_step} cannot fill groups.max_group_size = "
            f"{c.groups.max_group_size} or groups.size_by = {c.groups.size_by}: lower the group size, or "
            "raise prompts_per_step"
        )
    if loss.distills and not (c.reference.path or template):
        yield (
            f"loss.loss_type = {loss.loss_type!r} has no teacher: set reference.path to a model, or "
            "reference.prompt_template for self-distillation"
        )
    if c.advantage.scales_parts and loss.beta and loss.kl_in_reward:
        yield (
            "loss.kl_in_reward = true loses its weight loss.beta by advantage.multi_objective_aggregation = "
            "'normalize_then_sum': set kl_in_reward to false, or the aggregation to sum_then_normalize"
        )
    if c.optimizer.stochastic_rounding and c.model.dtype not in ("auto", "bfloat16"):
        yield (
            f"optimizer.stochastic_rounding = true rounds weights to bfloat16, and model.dtype = "
            f"{c.model.dtype!r}: leave it out, or set model.dtype to bfloat16"
        )
    warmup = c.optimizer.warmup_steps
    if c.epochs is None and warmup >= c.max_steps:
        yield (
            f"optimizer.warmup_steps = {warmup} leaves no step of max_steps = {c.max_steps} at the full "
            "rate: lower it, or give warmup_ratio, a share of max_steps"
        )
    if c.epochs is None and 0 < warmup < 1:
        needs = "max_steps with warmup_ratio, or epochs: set these, or a number of steps"
        yield f"optimizer.warmup_steps = {warmup} is a share, and needs {needs}"
    if c.epochs and (
        "max_steps" in c.model_fields_set or c.stages or c.curriculum or c.advantage.dynamic_sampling
    ):
        yield (
            f"epochs = {c.epochs:g} sets the length of the run, and max_steps, stages, curriculum and "
            "advantage.dynamic_sampling do, too: leave out one or the others"
        )
