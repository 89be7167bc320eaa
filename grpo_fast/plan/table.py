"""Which model trains on which GPU: the largest group and the longest context, of all weights or adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.model_shape import model_config
from grpo_fast.plan.search import Context, Search, with_values
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.plan.trace import Traces
from grpo_fast.policy.config import LoraConfig

MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B")
GPUS = ("RTX-4080", "RTX-4090", "A100-40", "H100", "H200")
HOST = 2  # memory of the host, times the GPU's

_ADAPTERS = {"model.lora": LoraConfig().model_dump(), "rollout.vllm.lora_sync": "adapter"}
TRAININGS: dict[str, dict[str, Any]] = {
    "full": {"model.lora": None, "model.quantization": None},
    "LoRA": _ADAPTERS | {"model.quantization": None},
    "QLoRA": _ADAPTERS | {"model.quantization": "nf4"},
}


@dataclass(frozen=True)
class Cell:
    """What fits of one model, trained in one way, on one GPU."""

    model: str
    training: str
    gpu: str
    bytes: int  # of the GPU
    group: int | None  # completions of a prompt in one micro-batch; None: not even two
    context: Context | None  # None: not even one token of a completion


def table(
    config: TrainConfig, sizes: StepSizes, models: Sequence[str], gpus: Sequence[str]
) -> Iterator[Cell]:
    """Of every model each training, and of this each GPU; the context is that of the group of `sizes`.

    Raises:
        ValueError: an unknown model or GPU, or as `Search`.
    """
    devices = [device_budget(gpu) for gpu in gpus]
    for model in models:
        traces = Traces(model_config(model))
        for training, values in TRAININGS.items():
            run = with_values(config, values | {"model.path": model})
            for device in devices:
                search = Search(run, traces, replace(device, host=HOST * device.total), sizes)
                group = search.largest_generations(at_once=True)
                context = search.largest_context(sizes.generations)
                yield Cell(model, training, device.name, device.total, group, context)
