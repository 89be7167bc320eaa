"""Settings that trade something for memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from grpo_fast.config import TrainConfig
from grpo_fast.plan.model_shape import ModelShape
from grpo_fast.plan.prediction import Prediction
from grpo_fast.policy.config import LoraConfig
from grpo_fast.rollout.handover import PARTS


@dataclass(frozen=True)
class Knob:
    """One change of the configuration."""

    key: str  # its place, dotted
    value: Any
    cost: str

    @property
    def text(self) -> str:
        """As it is written on the command line."""
        value = self.value
        if isinstance(value, LoraConfig):
            return f"{self.key}={{r: {value.r}}}"
        if isinstance(value, list):
            return f"{self.key}=[{', '.join(value)}]"
        return f"{self.key}={str(value).lower()}"

    def change(self, config: TrainConfig) -> TrainConfig:
        """The configuration with it."""
        return _replaced(config, self.key.split("."), self.value)


def possible_knobs(config: TrainConfig, prediction: Prediction, shape: ModelShape) -> Iterator[Knob]:
    """What this configuration has not turned yet."""
    model, rollout = config.model, config.rollout
    on_vllm = "engine residue" in prediction.parts["rollout"]
    if not model.gradient_checkpointing:
        yield Knob("model.gradient_checkpointing", True, "a second forward of every layer")
    if model.lora is None and "experts" not in shape.parameters:
        yield Knob("model.lora", LoraConfig(), "adapters train, not the weights")
    if model.lora is None and model.train_lm_head:
        yield Knob("model.train_lm_head", False, "the head stays as it is")
    if model.dtype == "float32":
        yield Knob("model.dtype", "bfloat16", "weights of 16 bits")
    if config.loss.needs_reference and model.lora is None:
        yield Knob("loss.beta", 0.0, "no KL to the first policy")
    if on_vllm and config.memory.offload != list(PARTS):
        yield Knob("memory.offload", list(PARTS), "copies at every step")
    if on_vllm and rollout.vllm.sleep_level == 0:
        yield Knob("rollout.vllm.sleep_level", "auto", "milliseconds at every step")
    if on_vllm and "engine weights" in prediction.parts["rollout"] and model.lora is not None:
        yield Knob("rollout.vllm.lora_sync", "adapter", "LoRA kernels while decoding")
    if on_vllm and rollout.vllm.share_weights is False:
        yield Knob("rollout.vllm.share_weights", "auto", "nothing")
    if config.micro_batch_tokens > 1:
        yield Knob("micro_batch_tokens", config.micro_batch_tokens // 2, "more and smaller forwards")
    if config.prompts_per_step > max(1, config.minibatches):
        half = max(config.minibatches, config.prompts_per_step // 2)
        yield Knob("prompts_per_step", half, "fewer prompts in a step")


def _replaced(section: Any, way: list[str], value: Any) -> Any:
    name, *rest = way
    changed = {name: _replaced(getattr(section, name), rest, value) if rest else value}
    return (
        section.model_copy(update=changed) if isinstance(section, BaseModel) else replace(section, **changed)
    )
