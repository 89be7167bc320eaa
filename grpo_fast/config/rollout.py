"""How completions are drawn, and what is offloaded meanwhile: the sections `rollout` and `memory`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_fast.config.section import Count, Fraction, Positive, PositiveInt, Section
from grpo_fast.objective.config import refuse_unread

EnginePath = Annotated[str, Field(pattern=":")]
Part = Literal["gradients", "optimizer", "master", "reference"]
"""What of a trainer can be offloaded; where not all of it needs to be, in this order: the cheapest first."""


class VLLMConfig(Section):
    """What can be set about vLLM; the defaults set themselves up."""

    kv_cache_gib: Positive | None = Field(
        None,
        description="GiB for keys and values; on a GPU less where vLLM measures less room; null: all the "
        "room where gpu_memory_utilization is set, else by the plan, on a CPU 1",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="share of the GPU in which vLLM measures that room; null: what is free where "
        "kv_cache_gib is set",
    )
    max_model_length: PositiveInt | None = Field(
        None,
        description="tokens of a prompt with its completion; null: the model's, or what the cache holds",
    )
    max_sequences: PositiveInt | None = Field(
        None,
        description="completions in flight at once; null: by the plan, at most 1,024, as many as fit at half "
        "of max_completion_length",
    )
    enforce_eager: bool | None = Field(
        None, description="neither compile nor capture CUDA graphs: a quick start; null: on a CPU only"
    )
    sleep_level: Literal["auto", 0, 1, 2] = Field(
        "auto",
        description="while the trainer works: 0 keeps everything, 1 moves the weights to the host, 2 drops "
        "them; 1 and 2 drop keys and values; auto: 0 where the plan has all beside each other, else 2 where "
        "the weights are sent again anyway, else 1",
    )
    share_weights: Literal["auto"] | bool = Field(
        "auto",
        description="the trainer's weights and vLLM's are the same memory: nothing to synchronise; auto: "
        "where the layouts allow it",
    )
    lora_sync: Literal["auto", "merged", "adapter"] = Field(
        "auto",
        description="merged sends base and adapter as one weight, adapter the adapter alone, beside weights "
        "that are shared; auto: adapter with a quantised base, else by the plan, and merged without one",
    )
    fp32_head: bool = Field(False, description="logits by a float32 product of hidden states and head")
    tensor_parallel_size: PositiveInt = Field(
        1, description="ranks of torchrun, one after the other, that hold one vLLM between them"
    )


class RolloutConfig(Section):
    """How completions are drawn."""

    engine: Literal["auto", "transformers", "vllm"] | EnginePath = Field(
        "auto",
        description="auto: vLLM where it is installed and the model on a GPU, else transformers; or one of "
        "your own, an `EngineKind` as `module:Class` or `path/to/file.py:Class`",
    )
    num_generations: Annotated[int, Field(ge=1, le=2**16)] = Field(
        8,
        description="completions of a prompt, at least 2 where they are compared; `grpo-fast plan` prints "
        "the largest number that fits",
    )
    on_policy_share: Fraction = Field(
        1.0,
        description="of loss_type opd: share of the steps whose completions are sampled, GKD's lambda; "
        "the others train on the data's column `completion`, one for each prompt",
    )
    max_completion_length: PositiveInt = Field(
        256, description="tokens; of all turns, what an environment writes included"
    )
    # What vLLM would take instead of a smaller one, and what draws as evenly as a higher one.
    temperature: Annotated[float, Field(ge=0.01, le=100)] = Field(
        1.0, description="divides the logits, when sampling and in the loss"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="the likeliest tokens that hold this share of the probability are drawn from; below 1, "
        "as with top_k or min_p, ratios to the sampler are biased: no loss may take them, and sampling/* is "
        "left out",
    )
    top_k: Count = Field(0, description="how many of the likeliest tokens are drawn from; 0: all")
    min_p: Fraction = Field(0.0, description="share of the likeliest token's probability that a token needs")
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], description="texts that end a completion")
    tools: list[str] = Field(
        [],
        description="functions that the model may call, as `module:function` or `path/to/file.py:function`",
    )
    environment: str | dict[str, str] | None = Field(
        None,
        description="class of which each completion gets an instance, as of TRL's environment_factory: "
        "`module:Class` or `path/to/file.py:Class`, or {name: class}, of which the column `environment` "
        "names one",
    )
    max_turns: PositiveInt | None = Field(
        None, description="messages of the model in a completion with tools; null: no limit"
    )
    max_tool_calls: PositiveInt | None = Field(None, description="calls in a completion; null: no limit")
    tool_timeout: float = Field(
        60.0, gt=0, le=1e6, description="seconds that a call of a tool or an environment may take"
    )
    function: str | None = Field(
        None,
        description="a rollout of your own, as `module:function`: called with the engine, the prompts (each "
        "as often as it is to be answered) and the sampling, it returns their completions",
    )
    router_replay: bool = Field(
        False,
        description="of a mixture of experts: an update sends each token to the experts that the sampler "
        "chose, weighed by the trainer's own router (R3, arXiv:2510.11370)",
    )
    max_batch_tokens: PositiveInt | None = Field(
        None,
        description="of the transformers engine: KV tokens in flight at once; null: all, or what keeps a CPU "
        "fast",
    )
    vllm: VLLMConfig = Field(VLLMConfig(), description="settings of the vLLM engine")

    @property
    def truncations(self) -> dict[str, float]:
        """What is set so that some tokens are never drawn."""
        return self.model_dump(include={"top_p", "top_k", "min_p"}, exclude_defaults=True)

    @property
    def has_turns(self) -> bool:
        """Whether a completion may have several turns, which tools or an environment answer."""
        return bool(self.tools) or self.environment is not None

    @model_validator(mode="before")
    @classmethod
    def _function_alone(cls, given: Any) -> Any:
        return {"function": given} if isinstance(given, str) else given  # `rollout: module:function`

    @model_validator(mode="after")
    def _one_kind_of_turns(self) -> RolloutConfig:
        if self.function is not None and self.has_turns:
            raise ValueError(
                f"rollout.function = {self.function!r} makes completions itself and would not call "
                "rollout.tools or rollout.environment; leave one of them out"
            )
        if not self.has_turns:
            limits = ("max_turns", "max_tool_calls", "tool_timeout")
            refuse_unread(self, limits, "without rollout.tools or rollout.environment", "rollout")
        if self.has_turns and self.stop:
            raise ValueError(
                f"rollout.stop = {self.stop} ends a completion in the middle of a turn, which tools "
                "then cannot answer; leave it out"
            )
        if self.has_turns and self.vllm.tensor_parallel_size > 1:
            raise ValueError(
                f"rollout.vllm.tensor_parallel_size = {self.vllm.tensor_parallel_size} with tools: ranks "
                "that share a vLLM cannot answer turns as they end; set it to 1"
            )
        return self


class MemoryConfig(Section):
    """What of the trainer is offloaded."""

    offload: Literal["auto", "none"] | list[Part] = Field(
        "auto",
        description="what of the trainer is offloaded to the host: gradient buffers and the reference model "
        "while the engine generates, Adam's moments and float32 masters whenever no optimiser step reads "
        "them. auto: on a GPU by the plan, and more where that leaves the engine too little room; "
        "elsewhere none",
    )
