"""The table of rollout engines: what each needs, and how it is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from grpo_fast.config.lookup import load_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from grpo_fast.config.rollout import RolloutConfig
    from grpo_fast.distributed.world import World
    from grpo_fast.policy import Policy
    from grpo_fast.rollout.types import Engine

ENGINES = {
    "transformers": "grpo_fast.rollout.engines:TransformersKind",
    "vllm": "grpo_fast.rollout.vllm.kind:VLLMKind",
}
"""Name: `module:Class` of an `EngineKind`; `rollout.engine` may be such a path too, of one from elsewhere."""


@dataclass(frozen=True)
class Trained:
    """What an engine's way with the weights follows from."""

    on_gpu: bool
    adapted: bool  # with LoRA
    quantized: bool
    sharded: bool
    experts: bool


@dataclass(frozen=True)
class Weights:
    """Where an engine has its weights from."""

    shared: bool  # they are the trainer's own memory
    sent: bool  # again after every update
    adapters: bool  # stay beside them


class EngineKind(ABC):
    """A row of the table: what is known of an engine before there is one."""

    name: ClassVar[str]
    draws_with_policy: ClassVar[bool] = False
    """Its log-probabilities are the trainer's own, so that there is nothing to correct."""
    tells_experts: ClassVar[bool] = False
    """Its completions have `experts` where `rollout.router_replay` asks for them."""

    @abstractmethod
    def needs(self, config: RolloutConfig) -> None:
        """Fail before the policy is loaded where `make` would afterwards.

        Raises:
            ValueError: a setting contradicts the engine.
            ImportError: what it needs is not installed.
        """

    def suits(self, architecture: PreTrainedConfig, *, on_gpu: bool, images: bool) -> None:
        """As `needs`, by transformers' configuration of the model and whether prompts have images."""
        return

    @abstractmethod
    def make(self, config: RolloutConfig, policy: Policy, *, max_length: int | None, world: World) -> Engine:
        """The engine; `max_length` is of the longest prompt with its completion, where known."""

    def weights(self, config: RolloutConfig, trained: Trained) -> Weights:
        """By default the trainer's own."""
        return Weights(shared=True, sent=False, adapters=False)

    def sleeps(self, config: RolloutConfig, on_gpu: bool) -> bool:
        """Whether it frees its memory while the trainer works."""
        return False


class TransformersKind(EngineKind):
    """Batched generation with the trainer's own model."""

    name = "transformers"
    draws_with_policy = True
    tells_experts = True

    def needs(self, config: RolloutConfig) -> None: ...

    def make(self, config: RolloutConfig, policy: Policy, *, max_length: int | None, world: World) -> Engine:
        from grpo_fast.rollout.transformers import OwnCopyEngine, TransformersEngine

        options: dict[str, Any] = {
            "max_batch_tokens": config.max_batch_tokens,
            "tells_experts": config.router_replay,
        }
        if max_length is not None:
            policy.fix_rope(max_length)
        if policy.sharded:
            return OwnCopyEngine(policy, max_length=max_length, **options)
        options |= {"eos_ids": policy.eos_token_ids, "image_reader": policy.image_reader}
        return TransformersEngine(policy.model, policy.tokenizer, **options)

    def weights(self, config: RolloutConfig, trained: Trained) -> Weights:
        return Weights(shared=not trained.sharded, sent=trained.sharded, adapters=False)


_loaded: dict[str, EngineKind] = {}  # by name


def engine_kind(name: str) -> EngineKind:
    """The row of this name, or at this path; one from elsewhere has a name once its path was asked for.

    Raises:
        ValueError: nothing of this name, or the path leads to no `EngineKind`.
    """
    if name in _loaded:
        return _loaded[name]
    if name not in ENGINES and ":" not in name:
        raise ValueError(
            f"rollout.engine = {name!r} is not known: give auto, {', '.join(ENGINES)}, or an EngineKind of "
            "your own as module:Class"
        )
    found = load_object(ENGINES.get(name, name), "rollout.engine")
    if not (isinstance(found, type) and issubclass(found, EngineKind)):
        raise ValueError(
            f"rollout.engine = {name!r} is no EngineKind; give a class that derives from "
            f"{__name__}:EngineKind"
        )
    kind = found()
    return _loaded.setdefault(kind.name, kind)


def draws_with_policy(name: str) -> bool:
    """Whether an engine of this name does; of an object that a program made, nothing is known to correct."""
    if name in ENGINES or name in _loaded or ":" in name:
        return engine_kind(name).draws_with_policy
    return True
