"""What a run keeps, and for whom: the sections `checkpoint`, `hub` and `logging` of the configuration."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from grpo_fast.section import Count, PositiveInt, Section


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
    show_samples: Count = Field(
        0, description="of these prompts, how many are printed, each with a completion"
    )
    tensorboard: bool = Field(True, description="metrics to tensorboard/ in the run's folder")
    wandb: bool = Field(False, description="metrics to Weights & Biases")
    trackio: bool = Field(False, description="metrics to trackio")
    project: str = Field("grpo_fast", description="of wandb and trackio")

    @model_validator(mode="after")
    def _shows_what_is_kept(self) -> LoggingConfig:
        if self.show_samples > (self.samples if self.samples_every else 0):
            raise ValueError(
                f"show_samples = {self.show_samples} prompts are more than are kept: raise logging.samples = "
                f"{self.samples}, and set logging.samples_every = {self.samples_every} above 0"
            )
        return self
