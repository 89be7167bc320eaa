"""The configuration: what a run is made of. YAML in, validated models out; nothing unknown is accepted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_fast.alerts import AlertsConfig
from grpo_fast.groups.config import AdaptiveWeightsConfig, CurriculumConfig, GroupConfig
from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.preference.sections import PreferenceConfig
from grpo_fast.rollout.vllm_config import VLLMConfig
from grpo_fast.section import Fraction, PositiveInt, Section


class LoraConfig(Section):
    """Low-rank adapters in place of the weights (Hu et al. 2021, arXiv:2106.09685), scaled by alpha / r."""

    r: PositiveInt = 16
    alpha: float = 32.0
    dropout: Fraction = 0.0
    target_modules: str | list[str] = "all-linear"


class ModelConfig(Section):
    """Which model, where, in which precision, and what of it is trained."""

    path: str = Field(
        description="a folder, a hub id, or `package:NAME` for a GGUF file shipped by a Python package"
    )
    revision: str | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str = "auto"
    attention: Literal["auto", "sdpa", "flash_attention_2", "flex_attention"] = "auto"
    lora: LoraConfig | None = None
    train_lm_head: bool = Field(
        True, description="false freezes the head, tied or not: no gradient of width V"
    )
    gradient_checkpointing: bool = False
    liger_kernels: bool = Field(False, description="liger-kernel's layer kernels; GPU only")
    chat_template: str | None = Field(None, description="a Jinja file, when the tokenizer has no template")
    trust_remote_code: bool = Field(
        False, description="true runs the Python code that the model's repository ships, whatever it does"
    )


class DatasetConfig(Section):
    """Where prompts come from, and how a row becomes one."""

    source: str = Field(description="JSONL, Parquet or CSV file, hub id, or `reasoning_gym:TASK`")
    name: str | None = Field(None, description="the hub dataset's configuration")
    split: str = Field("train", description="the hub dataset's split; a file is one split")
    prompt_column: str = "prompt"
    rename: dict[str, str] = Field({}, description="column in the data -> its name everywhere else")
    prompt_template: str | None = Field(
        None, description="str.format over the row's columns; makes the prompt"
    )
    chat: Literal["auto"] | bool = Field(
        "auto", description="text becomes a user turn of the chat template; auto: where the tokenizer has one"
    )
    system_prompt: str | None = None
    examples: list[tuple[str, str]] = Field(
        [], description="turns (user, assistant) shown before each prompt"
    )
    max_prompt_length: PositiveInt | None = None
    overlong_prompts: Literal["filter", "truncate", "error"] = "filter"
    size: PositiveInt | None = Field(None, description="rows to generate, or to keep")
    seed: int = 0
    options: dict[str, Any] = Field({}, description="passed to the generator of `reasoning_gym:TASK`")


class RewardConfig(Section):
    """One reward function, and how it counts."""

    reward: str = Field(description="a built-in's name, or `module:function`, or `path/to/file.py:function`")
    weight: float = 1.0
    options: dict[str, Any] = Field({}, description="keyword arguments bound to the function")
    timeout: float = Field(60.0, gt=0, description="seconds one call may take")
    on_error: Literal["fail", "skip"] = "fail"
    per_group: bool = Field(
        False,
        description="true: it scores each prompt's completions by themselves, so it is called for a group as "
        "soon as that is complete, while others still decode; pays for slow functions",
    )


class AdaptiveLengthConfig(Section):
    """`rollout.max_completion_length` is where the limit starts; it then follows the completions' lengths."""

    max: PositiveInt = Field(description="tokens that the limit grows to at most; evaluation always uses it")
    min: PositiveInt = Field(16, description="tokens that it shrinks to at least")
    window: PositiveInt = Field(8, description="steps that a decision looks back on")
    grow_above: Fraction = Field(
        0.1, description="mean share of truncated completions above which the limit grows by half"
    )
    shrink_below: Fraction = Field(
        0.5,
        description="share of the limit that 99 % of every step's completions must stay below, with none "
        "truncated, for it to shrink to 1.25 times what they need",
    )


class RolloutConfig(Section):
    """How completions are drawn."""

    engine: Literal["auto", "transformers", "vllm"] = Field(
        "auto", description="auto: vLLM where it is installed and the model on a GPU, else transformers"
    )
    num_generations: Annotated[int, Field(ge=2)] | Literal["auto"] = Field(
        8, description="completions of a prompt; auto: as many as the memory holds, up to 64"
    )
    max_completion_length: PositiveInt = 256
    adaptive_length: AdaptiveLengthConfig | None = Field(
        None, description="moves the limit by what completions need; none: it stays"
    )
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Fraction = 0.0
    stop: list[str] = Field([], description="texts that end a completion")
    max_batch_tokens: PositiveInt | None = Field(
        None,
        description="of the transformers engine: KV tokens in flight at once; none: all, or what keeps a CPU "
        "fast",
    )
    vllm: VLLMConfig = VLLMConfig()

    @property
    def length_limit(self) -> int:
        """Tokens that no completion of the run exceeds."""
        return self.max_completion_length if self.adaptive_length is None else self.adaptive_length.max

    @model_validator(mode="after")
    def _length_within_bounds(self) -> RolloutConfig:
        bounds, start = self.adaptive_length, self.max_completion_length
        if bounds is not None and not bounds.min <= start <= bounds.max:
            raise ValueError(
                f"rollout.max_completion_length = {start} is where adaptive_length starts, but not within "
                f"its min = {bounds.min} and max = {bounds.max}; change one of them"
            )
        return self


class MemoryConfig(Section):
    """What leaves the GPU while completions are drawn."""

    offload: Literal["auto", "none"] | list[Literal["gradients", "optimizer", "master", "reference"]] = Field(
        "auto",
        description="what of the trainer leaves the GPU while the engine generates: gradient buffers, Adam's "
        "moments, float32 masters, the reference model. auto: in this order, until the engine has room",
    )


class AdvantageConfig(Section):
    """How the rewards of a group become advantages, and which completions train."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    baseline: Literal["mean", "leave_one_out"] = "mean"
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize",
        description="normalize_then_sum scales each reward by itself before they are added (GDPO)",
    )
    skip_flat_groups: bool = Field(
        True, description="groups whose rewards are all equal leave the update, KL and entropy terms too"
    )
    dynamic_sampling: bool = Field(False, description="draw until the batch is full of groups with spread")
    max_draws: PositiveInt = Field(3, description="batches that dynamic sampling may draw for one step")
    mask_truncated: bool = Field(False, description="truncated completions leave the loss")
    function: str | None = Field(
        None,
        description="`module:function` of your own: (list[Group], rewards (G, n)) -> a number for each "
        "completion, or one for each of its tokens",
    )

    @model_validator(mode="after")
    def _consistent(self) -> AdvantageConfig:
        if self.multi_objective_aggregation == "normalize_then_sum" and self.scale_rewards == "none":
            raise ValueError(
                "advantage.multi_objective_aggregation = 'normalize_then_sum' contradicts scale_rewards = "
                "'none', which normalises nothing; set scale_rewards to group or batch, or sum_then_normalize"
            )
        return self


class OptimizerConfig(Section):
    """AdamW, the learning rate's schedule and the gradient's clip."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_learning_rate_ratio: Fraction = 0.0


class EvaluationConfig(Section):
    """When and how held-out questions are scored."""

    dataset: DatasetConfig | None = None
    every: Annotated[int, Field(ge=0)] = Field(
        0, description="steps between evaluations; 0: before and after only"
    )
    size: PositiveInt | None = Field(
        None, description="questions used while training; before and after use all"
    )
    num_samples: PositiveInt = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0
    threshold: float = Field(1.0, description="the reward from which an answer counts as right")
    reward: str | None = Field(None, description="which reward decides; none: the first")


class CheckpointConfig(Section):
    """How often a run is saved, and how many saves it keeps."""

    every: Annotated[int, Field(ge=0)] = Field(0, description="steps between checkpoints; 0: at the end only")
    keep: PositiveInt = 2


class LoggingConfig(Section):
    """What a run writes down, and for whom."""

    every: PositiveInt = 1
    samples_every: Annotated[int, Field(ge=0)] = 5
    samples: PositiveInt = 4
    tensorboard: bool = True
    wandb: bool = False
    trackio: bool = False
    project: str = "grpo_fast"


class StageConfig(Section):
    """A stretch of the run with settings of its own."""

    name: Annotated[str, Field(min_length=1)]
    steps: PositiveInt | None = Field(None, description="none, for the last stage: until max_steps")
    fresh_optimizer: bool = Field(
        False, description="forget the moments, and begin the learning rate's schedule anew"
    )
    overrides: dict[str, Any] = Field(
        {},
        description="sections as at the top level; a new source, loss_type, strategy or method replaces its "
        "section",
    )


# What only training on the policy's own completions reads.
_SAMPLING = (
    *("rewards", "rollout", "memory", "advantage", "loss"),
    *("num_iterations", "minibatches", "old_logprobs"),
    *("groups", "curriculum", "adaptive_weights", "stages"),
    *(f"evaluation.{key}" for key in ("num_samples", "temperature", "threshold", "reward")),
)


class TrainConfig(Section):
    """A whole run. `grpo-fast train --print-config` prints one."""

    algorithm: Literal["grpo", "dpo", "rank"] = Field(
        "grpo", description="dpo: preference pairs; rank: ranked groups; both on fixed completions"
    )
    output_dir: str = "runs/default"
    seed: int = 0
    max_steps: PositiveInt = 100
    prompts_per_step: PositiveInt = 16
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
    threads: PositiveInt | None = Field(None, description="CPU threads; none: torch's choice")
    model: ModelConfig
    dataset: DatasetConfig
    rewards: list[RewardConfig] = Field([], description="what grpo maximises; at least one")
    rollout: RolloutConfig = RolloutConfig()
    memory: MemoryConfig = MemoryConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: GRPOLossConfig = GRPOLossConfig()
    preference: PreferenceConfig = PreferenceConfig()
    groups: GroupConfig = GroupConfig()
    curriculum: CurriculumConfig | None = None
    adaptive_weights: AdaptiveWeightsConfig | None = None
    stages: list[StageConfig] = Field([], description="in order; what they leave is as here")
    optimizer: OptimizerConfig = OptimizerConfig()
    alerts: AlertsConfig = AlertsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

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
            from grpo_fast.stages import resolve_stages  # it makes a configuration of each stage

            resolve_stages(self)
        return self
