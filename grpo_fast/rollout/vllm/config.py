"""What can be set about vLLM; the defaults set themselves up."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_fast.section import PositiveInt, Section


class VLLMConfig(Section):
    """The `rollout.vllm` section."""

    kv_cache_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="memory for keys and values; none: by gpu_memory_utilization, on a CPU 1"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of the GPU that vLLM may fill; none: half of what is free when it starts"
    )
    max_model_length: PositiveInt | None = Field(
        None, description="longest prompt with its completion; none: the model's, or what the cache holds"
    )
    max_sequences: PositiveInt | None = Field(
        None, description="completions in flight at once; none: vLLM's choice for the device"
    )
    enforce_eager: bool | None = Field(
        None, description="neither compile nor capture CUDA graphs: a quick start; none: on a CPU only"
    )
    sleep_level: Literal["auto", 0, 1, 2] = Field(
        "auto",
        description="while the trainer works: 0 keeps everything, 1 moves the weights to the host, 2 drops "
        "them; 1 and 2 drop keys and values; auto: 2 where the weights are sent again anyway, else 1",
    )
    share_weights: Literal["auto"] | bool = Field(
        "auto",
        description="the trainer's weights and vLLM's are the same memory: nothing to synchronise; auto: "
        "where the layouts allow it",
    )
    lora_sync: Literal["auto", "merged", "adapter"] = Field(
        "auto",
        description="merged sends base and adapter as one weight, adapter the adapter alone; auto: merged",
    )
    fp32_head: bool = Field(False, description="logits by a float32 product of hidden states and head")
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs under one model; start with torchrun")
