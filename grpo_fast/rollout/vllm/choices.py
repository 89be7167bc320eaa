"""What the settings of `rollout.vllm` come to for a policy on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from grpo_fast.rollout.vllm.config import VLLMConfig
from grpo_fast.rollout.vllm.sync import has_experts

if TYPE_CHECKING:
    from grpo_fast.policy import Policy


def uses_adapters(policy: Policy, config: VLLMConfig) -> bool:
    """Whether LoRA reaches vLLM as an adapter.

    Merged is the default: decoding needs no LoRA kernels, and any rank and target will do.
    """
    if config.lora_sync == "auto":
        return False
    if not policy.has_adapters:
        raise ValueError(
            f"rollout.vllm.lora_sync = {config.lora_sync!r}, but the policy has no LoRA; leave it at auto"
        )
    return config.lora_sync == "adapter"


def shares_weights(policy: Policy, config: VLLMConfig, adapters: bool) -> bool:
    """Whether to try; `auto` does on a GPU, as a CPU packs its weights."""
    obstacle = None
    if config.tensor_parallel_size > 1:
        obstacle = f"tensor_parallel_size = {config.tensor_parallel_size} gives each process a slice"
    elif policy.has_adapters and not adapters:
        obstacle = "merged LoRA weights are not the policy's own; set lora_sync to adapter"
    elif has_experts(policy):
        # They would stay beside the trainer's: sharing takes the model out of what vLLM's sleep gives away.
        obstacle = "vLLM lays out experts in its own way; leave them to its sleep"
    if config.share_weights is True and obstacle is not None:
        raise ValueError(f"rollout.vllm.share_weights = true: {obstacle}, or share_weights to auto")
    wanted = policy.device.type == "cuda" if config.share_weights == "auto" else config.share_weights
    return bool(wanted) and obstacle is None


def sleep_level(policy: Policy, config: VLLMConfig, adapters: bool) -> Literal["auto", 0, 1, 2]:
    """The level as configured, "auto" where it depends on how weights are sent."""
    if policy.device.type != "cuda":
        if config.sleep_level not in ("auto", 0):
            raise ValueError(
                f"rollout.vllm.sleep_level = {config.sleep_level} needs a GPU: on {policy.device.type} vLLM "
                "keeps its memory; leave it at auto"
            )
        return 0
    if config.sleep_level == 2 and adapters:
        raise ValueError(
            "rollout.vllm.sleep_level = 2 drops the base that lora_sync = 'adapter' never sends again; set "
            "sleep_level to 1, or lora_sync to merged"
        )
    return config.sleep_level
