"""What a run keeps, and where its model goes: the sections `checkpoint` and `hub` of the configuration."""

from __future__ import annotations

from pydantic import Field, field_validator

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
