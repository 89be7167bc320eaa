"""How completions are drawn, and what leaves the device meanwhile: the sections `rollout` and `memory`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_fast.rollout.vllm.config import VLLMConfig
from grpo_fast.section import Fraction, PositiveInt, Section


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
