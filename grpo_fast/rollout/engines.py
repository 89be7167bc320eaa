"""The table of rollout engines: requirements and constructors."""

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
"""`module:Class` of each `EngineKind` by name. `rollout.engine` may also be such a path."""


@dataclass(frozen=True)
class Trained:
    """The facts about a policy that decide how an engine gets its weights."""

    adapted: bool  # with LoRA
    quantized: bool
    sharded: bool
    experts: bool


@dataclass(frozen=True)
class Weights:
    """How an engine gets the policy's weights."""

    obstacle: str | None = None  # to sharing the trainer's memory
    adapters: bool = False  # LoRA stays separate

    @property
    def shared(self) -> bool:
        return self.obstacle is None

    @property
    def sent(self) -> bool:
        """Return whether all weights are copied after every update."""
        return not (self.shared or self.adapters)


class EngineKind(ABC):
    """A row of the table: a kind of engine, before one is made."""

    name: ClassVar[str]
    draws_with_policy: ClassVar[bool] = False
    """It samples with the trainer's model, so that its log-probabilities need no correction."""
    tells_experts: ClassVar[bool] = False
    """It returns the routed experts with `rollout.router_replay`."""

    @abstractmethod
    def needs(self, config: RolloutConfig) -> None:
        """Check before the policy is loaded what `make` needs.

        Raises:
            ValueError: a setting contradicts the engine.
            ImportError: a package is missing.
        """

    def suits(self, architecture: PreTrainedConfig, *, on_gpu: bool, images: bool) -> None:
        """Check as `needs` does, with the model's configuration and whether prompts have images."""
        return

    @abstractmethod
    def make(self, config: RolloutConfig, policy: Policy, *, max_length: int | None, world: World) -> Engine:
        """Return an engine; `max_length` is the longest prompt with its completion, if known."""

    def weights(self, config: RolloutConfig, trained: Trained) -> Weights:
        """Return how the engine gets its weights; by default it shares the trainer's."""
        return Weights()

    def sleeps(self, config: RolloutConfig, on_gpu: bool) -> bool:
        """Return whether the engine frees its memory during updates."""
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
        return Weights("the policy's weights are sharded" if trained.sharded else None)


_loaded: dict[str, EngineKind] = {}  # by name


def engine_kind(name: str) -> EngineKind:
    """Return the row of this name, or load a custom one from `module:Class`.

    Raises:
        ValueError: an unknown name, or the path leads to no `EngineKind`.
    """
    if name in _loaded:
        return _loaded[name]
    if name not in ENGINES and ":" not in name:
        raise ValueError(
            f"rollout.engine = {name!r} is not known: give auto, {', '.join(ENGINES)}, or a custom "
            "EngineKind as module:Class"
        )
    found = load_object(ENGINES.get(name, name), "rollout.engine")
    if not (isinstance(found, type) and issubclass(found, EngineKind)):
        raise ValueError(
            f"rollout.engine = {name!r} is no EngineKind; give a subclass of {__name__}:EngineKind"
        )
    kind = found()
    return _loaded.setdefault(kind.name, kind)


def draws_with_policy(name: str) -> bool:
    """Return `EngineKind.draws_with_policy` by name; True for an engine object of the user's program."""
    if name in ENGINES or name in _loaded or ":" in name:
        return engine_kind(name).draws_with_policy
    return True
