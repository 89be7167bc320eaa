"""Generate completions: the Engine protocol and its implementations."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from grpo_fast.rollout.engines import EngineKind, engine_kind
from grpo_fast.rollout.requests import Requests
from grpo_fast.rollout.types import (
    Completion,
    Engine,
    Episode,
    Rollout,
    RolloutObserver,
    Sampling,
    generate_rollout,
)

if TYPE_CHECKING:
    import torch

    from grpo_fast.config.rollout import RolloutConfig
    from grpo_fast.distributed.world import World
    from grpo_fast.policy import Policy

__all__ = [
    "Completion",
    "Engine",
    "EngineKind",
    "Episode",
    "Requests",
    "Rollout",
    "RolloutObserver",
    "Sampling",
    "chosen_engine",
    "engine_kind",
    "generate_rollout",
    "make_engine",
    "require_engine",
    "sampling_of",
]


def sampling_of(config: RolloutConfig, seed: int | None = None) -> Sampling:
    """Return a run's sampling parameters, without log-probabilities."""
    keys = ("max_completion_length", "temperature", "top_p", "top_k", "min_p", "stop")
    return Sampling(**{key: getattr(config, key) for key in keys}, seed=seed, logprobs=False)


def chosen_engine(config: RolloutConfig, device: torch.device) -> str:
    """Resolve `config.engine`: `auto` is vLLM where it is installed on a GPU, else transformers."""
    if config.engine != "auto":
        return config.engine
    if device.type != "cuda":
        return "transformers"
    from grpo_fast.rollout.vllm import installed_version, version_problem

    version = installed_version()
    problem = version_problem(version)
    if version is not None and problem is not None:
        warnings.warn(f"rollout.engine = 'auto' chooses transformers: {problem}", stacklevel=2)
    return "vllm" if problem is None else "transformers"


def require_engine(config: RolloutConfig, ranks: int = 1) -> None:
    """Check before the policy is loaded what `make_engine` needs.

    Raises:
        ValueError, ImportError: as `EngineKind.needs`; ValueError also for another number of ranks.
    """
    if ranks % (parallel := config.vllm.tensor_parallel_size):
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size = {parallel} does not divide the number of ranks, {ranks}; "
            "set it to 1, or torchrun --nproc-per-node to a multiple of it"
        )
    if config.engine == "auto":
        return
    kind = engine_kind(config.engine)
    if config.router_replay and not kind.tells_experts:
        raise ValueError(
            f"rollout.router_replay = true, but engine {kind.name!r} does not return routed experts "
            "(EngineKind.tells_experts); leave it out, or set rollout.engine to transformers or vllm"
        )
    kind.needs(config)


def make_engine(
    config: RolloutConfig,
    policy: Policy,
    *,
    max_length: int | None = None,
    world: World | None = None,
) -> Engine:
    """Return the engine that `chosen_engine` names; all ranks of `world` make theirs together.

    Args:
        max_length: tokens of the longest prompt with its completion, if known: the context length of vLLM
            and of rotary positions that depend on it.
        world: the ranks; None: one process.

    Raises:
        ValueError, ImportError: as `require_engine`, or a setting contradicts the device or the policy.
    """
    from grpo_fast.distributed.world import SINGLE_PROCESS

    world = world or SINGLE_PROCESS
    config = config.model_copy(update={"engine": chosen_engine(config, policy.device)})
    require_engine(config, world.size)
    return engine_kind(config.engine).make(config, policy, max_length=max_length, world=world)
