"""The sections `checkpoint`, `hub`, `logging` and `alerts`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from grpo_fast.config.section import Count, Fraction, OpenShare, Positive, PositiveInt, Section, Share

# In a run's folder.
CONFIG_FILE, LOCK_FILE = "config.yaml", "run.lock"
CHECKPOINTS_DIR, INPUTS_DIR = "checkpoints", "inputs"

Factor = Annotated[float, Field(gt=1)]


class CheckpointConfig(Section):
    """Checkpoints of a run."""

    every: Count = Field(0, description="steps between checkpoints; 0: only at the end")
    keep: PositiveInt = Field(2, description="number of checkpoints to keep; older ones are deleted")


class HubConfig(Section):
    """The repository of the trained model on the Hugging Face hub.

    The token is HF_TOKEN, or that of `hf auth login`.
    """

    push: str = Field(description="the repository, `owner/name`; created if it does not exist")
    private: bool = Field(True, description="of a repository that is created")

    @field_validator("push")
    @classmethod
    def _is_repository(cls, name: str) -> str:
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ValueError(str(error)) from None
        if "/" not in name:
            raise ValueError(f"names no owner; write owner/{name}")
        return name


class LoggingConfig(Section):
    """Metrics, samples and trackers."""

    every: PositiveInt = Field(1, description="steps between those that are sent to trackers")
    verbose: bool = Field(False, description="print all metrics of a step; `--verbose`")
    samples_every: Count = Field(5, description="steps between those whose completions are saved; 0: none")
    samples: PositiveInt = Field(
        4, description="prompts to save: the first with all completions, others with one"
    )
    tensorboard: bool = Field(True, description="write metrics to tensorboard/ in the run's folder")
    wandb: bool = Field(False, description="send metrics to Weights & Biases")
    trackio: bool = Field(False, description="send metrics to trackio")
    project: str = Field("grpo_fast", description="project of wandb and trackio")


class AlertsConfig(Section):
    """Thresholds of warnings, for means over `window` steps; null switches an alert off."""

    window: PositiveInt = Field(10, description="steps of a mean")
    clear_margin: Fraction = Field(
        0.1, description="share of the threshold that a mean must return before it clears"
    )
    reward_rise: Positive | None = Field(
        0.05, description="rise of the reward while the held-out score falls"
    )
    held_out_drop: Positive = Field(
        0.03,
        description="drop of the held-out score below its best, and beyond its interval, for reward_rise",
    )
    length_reward_correlation: Share | None = Field(
        0.8, description="largest absolute correlation of length and reward within groups"
    )
    length_drift: Factor | None = Field(
        2.0, description="largest factor of the mean length since the first window"
    )
    unique_completions: OpenShare | None = Field(0.1, description="smallest share of distinct completions")
    entropy: Positive | None = Field(0.02, description="smallest entropy, in nats per token, if measured")
    kl: Positive | None = Field(0.5, description="largest KL to the reference, in nats per token")
    flat_groups: Fraction | None = Field(0.9, description="largest share of groups with zero reward variance")
    stale_rewards: Positive | None = Field(1e-6, description="smallest difference of rewards in a window")
    truncated: Fraction | None = Field(0.5, description="largest share of truncated completions")
    evaluation_truncated: Fraction | None = Field(
        0.2, description="largest share of truncation in evaluations"
    )
    divergence: Factor | None = Field(10.0, description="largest factor of the gradient norm in a window")
    sampler_drift: Positive | None = Field(
        0.1,
        description="largest difference, in nats per token, of the rollout engine's and the trainer's "
        "log-probabilities; where no loss reads vLLM's, they are requested every tenth step. A difference "
        "beyond rounding at the first step is an error; null switches that off, too",
    )
    correction_weight: OpenShare | None = Field(
        0.5, description="smallest mean weight of a token after loss.sampler_correction"
    )
