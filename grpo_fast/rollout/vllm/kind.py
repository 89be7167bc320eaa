"""vLLM's row of the table of engines, without an import of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.rollout.engines import EngineKind, Trained, Weights
from grpo_fast.rollout.vllm import experts_problem, require_vllm
from grpo_fast.rollout.vllm.settings import require_vision, weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from grpo_fast.distributed.world import World
    from grpo_fast.policy import Policy
    from grpo_fast.rollout.types import Engine


class VLLMKind(EngineKind):
    name = "vllm"
    tells_experts = True

    def needs(self, config: RolloutConfig) -> None:
        if config.max_batch_tokens is not None:
            raise ValueError(
                f"rollout.max_batch_tokens = {config.max_batch_tokens}: rollout.engine = 'vllm' ignores it; "
                "set rollout.vllm.kv_cache_gib instead"
            )
        require_vllm()
        if config.router_replay and (problem := experts_problem()):
            raise ValueError(f"rollout.router_replay = true: {problem}")

    def suits(self, architecture: PreTrainedConfig, *, on_gpu: bool, images: bool) -> None:
        require_vision(architecture, on_gpu=on_gpu, images=images)

    def make(self, config: RolloutConfig, policy: Policy, *, max_length: int | None, world: World) -> Engine:
        from grpo_fast.rollout.vllm.engine import VLLMEngine

        self.suits(policy.base_model.config, on_gpu=policy.device.type == "cuda", images=False)
        return VLLMEngine(
            policy, config.vllm, max_length=max_length, world=world, tells_experts=config.router_replay
        )

    def weights(self, config: RolloutConfig, trained: Trained) -> Weights:
        return weights_of(config.vllm, trained)

    def sleeps(self, config: RolloutConfig, on_gpu: bool) -> bool:
        return on_gpu and config.vllm.sleep_level != 0
