"""vLLM's row of the table of engines: what it needs and what it will hold, without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.rollout.engines import Demand, EngineKind, EnginePrice, Trained, Weights
from grpo_fast.rollout.vllm import experts_problem, require_vllm
from grpo_fast.rollout.vllm.settings import keeps_adapters, kv_cache_gib, require_vision, sharing_obstacle

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from grpo_fast.distributed.world import World
    from grpo_fast.policy import Policy
    from grpo_fast.rollout.types import Engine

GIB = 1 << 30
BLOCK_TOKENS = 16  # of one page of the KV cache
RESIDUE = int(0.4 * GIB)
"""Awake or asleep: graphs, handles. Seen on an H200 with vLLM 0.26 and Qwen2.5-1.5B's shape."""

_LARGE_GPU = 70 * GIB  # from here on vLLM takes the larger of its two defaults
_BATCHED_TOKENS = (8192, 16384)  # tokens of one forward
_SAMPLER_COPIES = 3  # of float32 logits in the sampler: logits, probabilities, sorted or masked ones


class VLLMKind(EngineKind):
    name = "vllm"
    tells_experts = True
    after_a_tool = "what of it is evicted meanwhile is computed again"

    def needs(self, config: RolloutConfig) -> None:
        if config.max_batch_tokens is not None:
            raise ValueError(
                f"rollout.max_batch_tokens = {config.max_batch_tokens} is not read by rollout.engine = "
                "'vllm'; set rollout.vllm.kv_cache_gib instead"
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
        adapters = trained.adapted and keeps_adapters(config.vllm, trained)
        shared = sharing_obstacle(config.vllm, trained) is None
        # Sent are the weights or, with adapters beside them, what never comes again.
        return Weights(shared, sent=not shared and not adapters, adapters=adapters)

    def sleeps(self, config: RolloutConfig, on_gpu: bool) -> bool:
        return on_gpu and config.vllm.sleep_level != 0

    def price(self, demand: Demand) -> EnginePrice:
        """With as many completions in flight as it may have, each at its longest and none preempted."""
        shape, sizes, config = demand.shape, demand.sizes, demand.config.vllm
        sequences, read = sizes.in_flight, demand.read_at_once
        most = _BATCHED_TOKENS[demand.device_bytes >= _LARGE_GPU]
        prefill = shape.fused.forward(min(most, read.prompts * read.prompt_length))
        shared = sizes.prompt_length // BLOCK_TOKENS  # a group shares the full pages of its prompt
        own = -(-sizes.sequence_length // BLOCK_TOKENS) - shared
        pages = min(sizes.prompts, sequences) * shared + sequences * own
        pages = max(pages, -(-sizes.longest // BLOCK_TOKENS)) + 1  # vLLM's null page
        size = kv_cache_gib(config, demand.trained.on_gpu)
        needed = pages * BLOCK_TOKENS * shape.paged_kv_bytes_per_token
        weights = self.weights(demand.config, demand.trained)
        adapters = shape.itemsize * shape.parameters.get("adapters", 0)
        return EnginePrice(
            weights=demand.base_bytes * (not weights.shared) + adapters * weights.adapters,
            kv_cache=needed if size is None else int(size * GIB),
            workspace=int(prefill) + 4 * _SAMPLER_COPIES * sequences * shape.vocabulary,
            residue=RESIDUE,
            rows=sequences,
        )
