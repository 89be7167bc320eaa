"""The sections `rollout` and `memory`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_fast.config.section import Count, Fraction, Group, Positive, PositiveInt, Seconds, Section, Share
from grpo_fast.objective.config import refuse_unread

EnginePath = Annotated[str, Field(pattern=":")]
Part = Literal["gradients", "optimizer", "master", "reference"]
"""What of a trainer can be offloaded, the cheapest first."""


class VLLMConfig(Section):
    """Settings of vLLM; each has a default that fits."""

    kv_cache_gib: Positive | None = Field(
        None,
        description="GiB of KV cache, at most the room that vLLM measures; null: all of it with "
        "gpu_memory_utilization, else by the plan, on a CPU 1",
    )
    gpu_memory_utilization: Share | None = Field(
        None, description="share of the GPU's memory for vLLM; null: what is free with kv_cache_gib"
    )
    max_model_length: PositiveInt | None = Field(
        None, description="tokens of prompt and completion; null: the model's, or what the cache holds"
    )
    max_sequences: PositiveInt | None = Field(
        None,
        description="concurrent completions; null: by the plan, at most 1,024, as many as fit at half of "
        "max_completion_length",
    )
    enforce_eager: bool | None = Field(
        None, description="neither compile nor capture CUDA graphs; null: on a CPU"
    )
    sleep_level: Literal["auto", 0, 1, 2] = Field(
        "auto",
        description="during an update: 0 keeps everything, 1 moves the weights to the CPU, 2 drops them; 1 "
        "and 2 drop the KV cache; auto: 0 if everything fits, else 2 if weights are sent anyway, else 1",
    )
    share_weights: Literal["auto"] | bool = Field(
        "auto",
        description="trainer and vLLM share the memory of the weights; auto: if their layouts allow it",
    )
    lora_sync: Literal["auto", "merged", "adapter"] = Field(
        "auto",
        description="merged: send base and adapter as one weight; adapter: send the adapter, and share the "
        "base; auto: adapter with a quantized base, else by the plan",
    )
    fp32_head: bool = Field(False, description="compute logits in float32")
    tensor_parallel_size: PositiveInt = Field(1, description="consecutive ranks of torchrun that share vLLM")


class RolloutConfig(Section):
    """How completions are sampled."""

    engine: Literal["auto", "transformers", "vllm"] | EnginePath = Field(
        "auto",
        description="auto: vLLM if it is installed and the model on a GPU, else transformers; or a custom "
        "`EngineKind`, as `module:Class` or `path/to/file.py:Class`",
    )
    num_generations: Group = Field(
        8, description="completions of a prompt, the group; `grpo-fast plan` prints the largest that fits"
    )
    on_policy_share: Fraction = Field(
        1.0,
        description="for loss_type opd: share of steps on sampled completions, GKD's lambda; others train on "
        "the data's column `completion`",
    )
    max_completion_length: PositiveInt = Field(256, description="tokens of all turns, environments included")
    # vLLM raises smaller ones, and larger ones sample as evenly.
    temperature: Annotated[float, Field(ge=0.01, le=100)] = Field(
        1.0, description="divides the logits, in sampling and in the loss"
    )
    top_p: Share = Field(
        1.0,
        description="nucleus sampling. With top_p < 1, top_k or min_p, ratios to the rollout engine are "
        "biased: losses that read them are refused, and sampling/* metrics are left out",
    )
    top_k: Count = Field(0, description="sample from the k most likely tokens; 0: all")
    min_p: Fraction = Field(0.0, description="smallest probability, relative to the most likely token's")
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], description="strings that end a completion")
    tools: list[str] = Field(
        [], description="functions that the model may call, `module:function` or `path/to/file.py:function`"
    )
    environment: str | dict[str, str] | None = Field(
        None,
        description="class with an instance for each completion, as TRL's environment_factory: "
        "`module:Class` or `path/to/file.py:Class`; or {name: class}, by the column `environment`",
    )
    max_turns: PositiveInt | None = Field(None, description="model messages in a completion; null: no limit")
    max_tool_calls: PositiveInt | None = Field(None, description="tool calls in a completion; null: no limit")
    tool_timeout: Seconds = Field(60.0, description="seconds per call of a tool or an environment")
    function: str | None = Field(
        None,
        description="custom rollout, `module:function`: called with the engine, the prompts (each once per "
        "completion) and the sampling parameters; returns the completions",
    )
    router_replay: bool = Field(
        False,
        description="for mixtures of experts: the update routes each token to the rollout's experts, "
        "weighted by the trainer's router (R3, arXiv:2510.11370)",
    )
    max_batch_tokens: PositiveInt | None = Field(
        None, description="KV tokens of a batch of the transformers engine; null: all, on a CPU a fast number"
    )
    vllm: VLLMConfig = Field(VLLMConfig(), description="settings of the vLLM engine")

    @property
    def truncations(self) -> dict[str, float]:
        """The settings by which some tokens are never sampled."""
        return self.model_dump(include={"top_p", "top_k", "min_p"}, exclude_defaults=True)

    @property
    def has_turns(self) -> bool:
        """Whether a completion may have several turns."""
        return bool(self.tools) or self.environment is not None

    @model_validator(mode="before")
    @classmethod
    def _function_alone(cls, given: Any) -> Any:
        return {"function": given} if isinstance(given, str) else given  # `rollout: module:function`

    @model_validator(mode="after")
    def _one_kind_of_turns(self) -> RolloutConfig:
        if not self.has_turns:
            limits = ("max_turns", "max_tool_calls", "tool_timeout")
            refuse_unread(self, limits, "without rollout.tools or rollout.environment", "rollout")
            return self
        problem = ""
        if self.function is not None:
            problem = f"rollout.function = {self.function!r} makes completions without them"
        elif self.stop:
            problem = f"rollout.stop = {self.stop} would end a completion within a turn"
        elif (size := self.vllm.tensor_parallel_size) > 1:
            problem = f"rollout.vllm.tensor_parallel_size = {size}: ranks that share a vLLM cannot run turns"
        if problem:
            raise ValueError(f"{problem}; leave it out, or rollout.tools and rollout.environment")
        return self


class MemoryConfig(Section):
    """CPU offload of the trainer's state."""

    offload: Literal["auto", "none"] | list[Part] = Field(
        "auto",
        description="what to offload to the CPU: gradients and the reference model during the rollout, "
        "Adam's moments and float32 masters except in an optimizer step. auto: on a GPU by the plan, "
        "elsewhere none",
    )
