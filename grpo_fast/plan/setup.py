"""What a prediction follows from: a model, a device, who shares it, and the sizes of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.policy.config import ModelConfig
from grpo_fast.policy.load import resolve_attention
from grpo_fast.rollout.handover import PARTS, Part

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Workload:
    """The sizes of one training step, each at its largest."""

    prompts: int  # prompts_per_step
    generations: int  # completions of each
    prompt_length: int  # tokens
    completion_length: int
    micro_batch_tokens: int
    minibatches: int = 1

    @property
    def completions(self) -> int:
        return self.prompts * self.generations

    @property
    def sequence_length(self) -> int:
        return self.prompt_length + self.completion_length


@dataclass(frozen=True)
class Setup:
    """Who is on the device, and what leaves it when."""

    config: PretrainedConfig
    model: ModelConfig
    device: DeviceBudget
    attention: Literal["sdpa", "flex_attention", "flash_attention_2"]
    engine: Literal["transformers", "vllm"]
    shares_weights: bool  # the engine generates with the trainer's own
    sleeps: bool  # the engine gives its memory up during the update
    offload: tuple[Part, ...] | Literal["auto"]  # of the trainer, during the rollout
    needs_reference: bool = False
    entropy_trained: bool = False  # the loss has a term of the entropy
    max_batch_tokens: int | None = None  # of the transformers engine
    kv_cache_bytes: int | None = None  # as configured
    max_sequences: int | None = None  # of vLLM

    @property
    def shares_prompts(self) -> bool:
        """As `Policy.shares_prompts`."""
        return self.attention != "flash_attention_2"

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.model.dtype)


def setup_of(config: TrainConfig, model_config: PretrainedConfig, device: DeviceBudget) -> Setup:
    """The setup of a run on a device, which need not be the one at hand."""
    vllm, loss, on_gpu = config.rollout.vllm, config.loss, device.kind == "cuda"
    engine = _engine(config, on_gpu)
    merged_lora = config.model.lora is not None and vllm.lora_sync != "adapter"
    wanted = on_gpu if vllm.share_weights == "auto" else vllm.share_weights
    shares = wanted and vllm.tensor_parallel_size == 1 and not merged_lora
    offload = config.memory.offload
    return Setup(
        config=model_config,
        model=config.model,
        device=device,
        attention=_attention(config.model, device),
        engine=engine,
        shares_weights=engine == "transformers" or shares,
        sleeps=engine == "vllm" and on_gpu and vllm.sleep_level != 0,
        offload=offload if offload == "auto" else tuple(p for p in PARTS if p in offload and on_gpu),
        needs_reference=loss.needs_reference and config.model.lora is None,
        entropy_trained=loss.needs_entropy,
        max_batch_tokens=config.rollout.max_batch_tokens,
        kv_cache_bytes=None if vllm.kv_cache_gib is None else int(vllm.kv_cache_gib * (1 << 30)),
        max_sequences=vllm.max_sequences,
    )


def workload_of(config: TrainConfig, *, prompt_length: int | None = None) -> Workload:
    """The sizes of a run's steps; a group of two where `num_generations` is not known yet.

    Raises:
        ValueError: nothing says how long prompts may be, or the algorithm has no rollouts.
    """
    if config.algorithm != "grpo":
        raise ValueError(f"algorithm = {config.algorithm!r} has no rollouts; only grpo can be planned")
    prompt_length = prompt_length or config.dataset.max_prompt_length
    if prompt_length is None:
        raise ValueError(
            "the longest prompt is not known: set dataset.max_prompt_length (or --prompt-length of "
            "`grpo-fast plan`)"
        )
    generations = config.rollout.num_generations
    return Workload(
        prompts=config.prompts_per_step,
        generations=2 if generations == "auto" else generations,
        prompt_length=prompt_length,
        completion_length=config.rollout.length_limit,
        micro_batch_tokens=config.micro_batch_tokens,
        minibatches=config.minibatches,
    )


def _engine(config: TrainConfig, on_gpu: bool) -> Literal["transformers", "vllm"]:
    """`auto` is vLLM on a GPU: a plan for another machine does not ask what is installed on this one."""
    if config.rollout.engine != "auto":
        return config.rollout.engine
    return "vllm" if on_gpu else "transformers"


def _attention(model: ModelConfig, device: DeviceBudget) -> str:
    if model.attention != "auto":
        return model.attention
    return resolve_attention("auto", torch.device(device.kind), model.dtype)
