"""What a run keeps, and for whom: the sections `checkpoint`, `hub`, `logging` and `alerts`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from grpo_fast.config.section import Count, Fraction, Positive, PositiveInt, Section

# In a run's folder.
CONFIG_FILE, LOCK_FILE = "config.yaml", "run.lock"
CHECKPOINTS_DIR, INPUTS_DIR = "checkpoints", "inputs"


class CheckpointConfig(Section):
    """How often a run is saved, and how many saves it keeps."""

    every: Count = Field(0, description="steps between checkpoints; 0: at the end only")
    keep: PositiveInt = Field(2, description="the newest checkpoints, as many; older ones are deleted")


class HubConfig(Section):
    """Where on the Hugging Face hub the trained model goes. The token is the environment's, HF_TOKEN or that
    of `hf auth login`."""

    push: str = Field(description="the repository, `owner/name`; made where it is not there")
    private: bool = Field(True, description="of a repository that is made; one that is there stays as it is")

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
    """What a run writes down, and for whom."""

    every: PositiveInt = Field(1, description="steps between those that the mirrors get")
    verbose: bool = Field(False, description="print every metric of a step; `--verbose`")
    samples_every: Count = Field(5, description="steps between those whose completions are kept; 0: none")
    samples: PositiveInt = Field(
        4, description="prompts whose completions are kept: the first's all, one of each other"
    )
    tensorboard: bool = Field(True, description="metrics to tensorboard/ in the run's folder")
    wandb: bool = Field(False, description="metrics to Weights & Biases")
    trackio: bool = Field(False, description="metrics to trackio")
    project: str = Field("grpo_fast", description="of wandb and trackio")


class AlertsConfig(Section):
    """When to warn. A threshold is compared with a mean over `window` steps; null switches its alert off."""

    window: PositiveInt = Field(10, description="steps that a figure is averaged over")
    clear_margin: Fraction = Field(
        0.1, description="share of the threshold by which a figure must come back before an alert clears"
    )
    reward_rise: Positive | None = Field(
        0.05, description="reward gained while the held-out score falls: reward hacking"
    )
    held_out_drop: Positive = Field(
        0.03,
        description="fall of the held-out score below its best that counts for reward_rise, if it also "
        "exceeds the score's interval",
    )
    length_reward_correlation: Annotated[float, Field(gt=0, le=1)] | None = Field(
        0.8, description="correlation of length and reward within groups, of either sign"
    )
    length_drift: Annotated[float, Field(gt=1)] | None = Field(
        2.0, description="factor by which the mean length leaves that of the first window"
    )
    unique_completions: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        0.1, description="share of a group's completions that differ, at least; 0: all the same"
    )
    entropy: Positive | None = Field(0.02, description="nats a token, at least; where measured")
    kl: Positive | None = Field(0.5, description="nats a token to the reference, at most")
    flat_groups: Fraction | None = Field(0.9, description="share of groups without spread, at most")
    stale_rewards: Positive | None = Field(
        1e-6, description="reward by which a window's completions differ, at least"
    )
    truncated: Fraction | None = Field(0.5, description="share of truncated completions, at most")
    evaluation_truncated: Fraction | None = Field(
        0.2, description="share of truncated answers to the held-out questions, at most"
    )
    divergence: Annotated[float, Field(gt=1)] | None = Field(
        10.0, description="factor of the gradient norm from the window's older half to its newer, at most"
    )
    sampler_drift: Positive | None = Field(
        0.1,
        description="nats a token between the sampler's log-probabilities and the trainer's, at most; vLLM "
        "is asked for its own at every tenth step where no loss reads them. More than rounding at the first "
        "step is an error, which null switches off, too",
    )
    correction_weight: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        0.5, description="mean weight that loss.sampler_correction leaves a token, at least"
    )
