"""One device, two tenants: the engine has it while it generates, the trainer while it updates.

    generate → sleep → (parts come back) update → (parts leave) → sync → wake → generate

Whoever needs the device next asks for it. A move that failed half-way, at an error, an interruption or for
want of memory, is simply asked for again: every step of it may be repeated, and the engine takes over the
weights before it wakes, however the update ended.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import torch

from grpo_fast.policy import Policy, PolicyOptimizer
from grpo_fast.policy.out_of_memory import is_out_of_memory
from grpo_fast.rollout.config import MemoryConfig
from grpo_fast.rollout.residency import Residency
from grpo_fast.rollout.types import Engine
from grpo_fast.run_record.clock import Clock

logger = logging.getLogger(__name__)
EVERYTHING = sys.maxsize  # more bytes than there are


class Tenancy:
    """Hands the device over. At first both are on it, and the engine may hold other weights."""

    def __init__(self, engine: Engine, policy: Policy, residency: Residency) -> None:
        self.engine = engine
        self.policy = policy
        self.residency = residency
        self._tenant: Literal["engine", "trainer"] | None = None
        self._needed = 0  # bytes that the engine gave up when it went to sleep, and will take again
        self._clock = Clock()

    def to_engine(self) -> None:
        """The engine is awake with the current weights; what it has no room for of the trainer has left."""
        if self._tenant == "engine":
            return
        try:
            self._hand_over()
        except RuntimeError as error:
            may_leave_more = self.residency.adapts and self._needed != EVERYTHING
            if not (may_leave_more and is_out_of_memory(error)):
                raise
            logger.warning("no room for the engine to wake in: from now on all of the trainer's parts leave")
            self._needed = EVERYTHING
            self._hand_over()
        self._tenant = "engine"

    def _hand_over(self) -> None:
        with self._clock("offload"):
            self.begin_leaving()
            self.residency.release()
            if self._needed and self.policy.device.type == "cuda":
                torch.cuda.empty_cache()  # of the activations: the engine takes its memory from the driver
        with self._clock("sync"):
            self.engine.sync(self.policy)
        with self._clock("wake"):
            self.engine.wake()

    def begin_leaving(self) -> None:
        """The update is over: copies start now, beside whatever else there is to do before `to_engine`."""
        self.residency.leave(self._needed)

    def to_trainer(self) -> None:
        """The engine sleeps, and everything of the trainer's is on the device."""
        if self._tenant == "trainer":
            return
        self._tenant = "trainer"  # first: whatever of this fails, the way back is the whole way
        with self._clock("sleep"):
            awake = sum(self.engine.memory().values())
            self.engine.sleep()
            given_up = max(0, awake - sum(self.engine.memory().values()))
            self._needed = max(self._needed, given_up)
        with self._clock("reload"):
            self.residency.fetch()

    def seconds(self) -> dict[str, float]:
        """What the moves since the last call took, by phase, and as `time/exchange` all of them together."""
        seconds, self._clock = self._clock.seconds, Clock()
        return seconds | {"time/exchange": sum(seconds.values())}


def trainer_residency(policy: Policy, optimizer: PolicyOptimizer, config: MemoryConfig) -> Residency:
    """The parts of a trainer that no rollout reads. The policy's weights stay: an engine may share them."""
    return Residency(
        {
            "gradients": optimizer.gradient_buffers,
            "optimizer": optimizer.moments,
            "master": optimizer.masters,
            "reference": policy.reference_weights,
        },
        device=policy.device,
        offload=() if config.offload == "none" else config.offload,
    )
