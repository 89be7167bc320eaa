"""vLLM's sleep as a cycle that cannot be left half-way without notice.

vLLM itself accepts requests while any of its memory is asleep, and then waits for ever; a second sleep or
wake unmaps or maps memory twice. Here each step is a transition between known phases: repeated ones do
nothing, a failed one can be asked for again, and nothing generates but in phase `AWAKE`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal, Protocol

Level = Literal[0, 1, 2]


class Phase(Enum):
    AWAKE = "awake"
    WEIGHTS = "its weights awake and its KV cache asleep"
    ASLEEP = "asleep"


class Sleeper(Protocol):
    """vLLM's `LLMEngine`, as far as sleeping goes."""

    def sleep(self, level: int) -> None: ...

    def wake_up(self, tags: list[str]) -> object: ...

    def is_sleeping(self) -> bool: ...


class SleepCycle:
    """Where in the cycle an engine is.

    Args:
        engine: what sleeps.
        level: 0 pauses, 1 moves weights to the host and drops the KV cache, 2 drops both.
        require_room: raises where there is no memory to wake a tag in, before vLLM would, half-way.
    """

    def __init__(
        self, engine: Sleeper, level: Level, require_room: Callable[[str], None] = lambda tag: None
    ) -> None:
        self.engine = engine
        self.level = level
        self._require_room = require_room
        self.phase = Phase.AWAKE
        self.weights_dropped = False

    def require_awake(self) -> None:
        """
        Raises:
            RuntimeError: a request would wait for ever.
        """
        if self.phase is not Phase.AWAKE:
            raise RuntimeError(f"generate() on an engine that is {self.phase.value}; call wake() first")
        if self.engine.is_sleeping():
            raise RuntimeError("vLLM was put to sleep behind the engine's back; use the engine's own sleep()")

    def sleep(self) -> None:
        """Does nothing unless awake."""
        if self.phase is not Phase.AWAKE:
            return
        self.phase = Phase.ASLEEP  # first: if it fails, nothing may generate until a wake has succeeded
        self.weights_dropped = self.level == 2
        self.engine.sleep(level=self.level)

    def wake_weights(self) -> None:
        """Take memory for the weights; at level 2 they hold nothing until they are loaded."""
        if self.phase is Phase.ASLEEP:
            if self.level > 0:
                self._wake("weights")
            self.phase = Phase.WEIGHTS

    def weights_loaded(self) -> None:
        self.weights_dropped = False

    def wake(self) -> None:
        """Does nothing when awake.

        Raises:
            RuntimeError: the weights were dropped and not loaded since, or there is no memory to wake in.
        """
        if self.phase is Phase.AWAKE:
            return
        if self.weights_dropped:
            raise RuntimeError("wake() on an engine whose weights were dropped; call sync() first")
        self.wake_weights()
        self._wake("kv_cache" if self.level > 0 else "scheduling")
        if self.engine.is_sleeping():
            raise RuntimeError("vLLM did not wake up completely; call wake() again once memory is free")
        self.phase = Phase.AWAKE

    def _wake(self, tag: str) -> None:
        try:
            if self.level > 0:
                self._require_room(tag)
            self.engine.wake_up(tags=[tag])
        except Exception as error:
            raise RuntimeError(
                f"vLLM could not take back its memory ({tag}): {error}; free some and call wake() again, or "
                "lower rollout.vllm.kv_cache_gib"
            ) from error
