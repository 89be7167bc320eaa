"""The device changes hands twice a step: the engine has it while it generates, the trainer while it updates.

    make room → engine.sync → engine.wake → generate → engine.sleep → update

The trainer has it first: an engine is put to sleep as soon as it is made, before masters, moments and a
resumed state take its place. What of the trainer no rollout reads makes room for the engine, as much as it
needs. Moments and masters go to the host for good and visit the device in the optimiser's step alone, so that
no backward finds them there either. The reference comes back for the update; gradient buffers, whose content
is worth nothing between steps, are only freed.

A step that failed half-way, at an error, an interruption or for want of memory, is simply asked for again:
each may be repeated, and the engine takes over the weights before it wakes, however the update ended.
"""

from __future__ import annotations

import logging
import math
import sys
from typing import Literal, get_args

import torch
from torch import Tensor

from grpo_fast.config.rollout import MemoryConfig, Part
from grpo_fast.policy import Policy, PolicyOptimizer
from grpo_fast.policy.host_memory import bytes_in_use, copies_on, host_like, move, side_stream
from grpo_fast.policy.out_of_memory import is_out_of_memory
from grpo_fast.record.logs import Clock
from grpo_fast.rollout.types import Engine

logger = logging.getLogger(__name__)
PARTS: tuple[Part, ...] = get_args(Part)
MARGIN = 2**30  # bytes left free beyond the engine's need: torch keeps cached blocks that are in part used


class DeviceHandover:
    """Hands the device to the engine or the trainer, who has it at first.

    Args:
        engine: put to sleep here.
        optimizer: made with what `config` keeps on the host.
        config: the run's `memory`: which parts make room in any case; others follow where that is not enough.

    Attributes:
        away: the parts that make room.
    """

    def __init__(
        self, engine: Engine, policy: Policy, optimizer: PolicyOptimizer, config: MemoryConfig
    ) -> None:
        self.engine = engine
        self.policy = policy
        self.optimizer = optimizer
        self.away: set[Part] = set() if isinstance(config.offload, str) else set(config.offload)
        self._fixed = config.offload == "none"
        self._holder: Literal["engine", "trainer"] | None = "trainer"
        self._stream = side_stream(policy.device)
        self._reference: dict[str, Tensor] = {}  # its copies on the host, by name
        self._reference_arrived: torch.cuda.Event | None = None
        self._clock, self._peak = Clock(), 0
        engine.sleep()

    def to_engine(self) -> None:
        """Make the room that the engine needs, and wake it with the current weights.

        Raises:
            RuntimeError: no room even with everything away, or as the engine raises it.
        """
        if self._holder == "engine":
            return
        self._holder = None  # whatever of this fails, either way does everything
        self._peak = max(self._peak, bytes_in_use(self.policy.device))
        needed: float = self.engine.freed()
        while not self._woken(needed):
            if self._makes_more_room(needed):
                logger.warning(
                    "no room for the engine to wake in: from now on the trainer keeps nothing beside it"
                )
                needed = math.inf
            else:
                self.engine.shrink()  # type: ignore[attr-defined]
                needed = self.engine.freed()
        self._holder = "engine"

    def _makes_more_room(self, needed: float) -> bool:
        return needed < math.inf and not (self._fixed or self.away.issuperset(PARTS))

    def _woken(self, needed: float) -> bool:
        """Wake the engine; return False where it has no room, and either side can take less."""
        try:
            with self._clock("offload"):
                self._make_room(needed)
            with self._clock("sync"):
                self.engine.sync(self.policy)
            with self._clock("wake"):
                self.engine.wake()
        except RuntimeError as error:
            less = self._makes_more_room(needed) or getattr(self.engine, "can_shrink", False)
            if not (less and is_out_of_memory(error)):
                raise
            return False
        return True

    def _make_room(self, needed: float) -> None:
        """Send away what was away before, and the next parts too until so many bytes are free."""
        for part in PARTS:
            short = needed and free_bytes_on(self.policy.device) < needed + MARGIN
            if part in self.away or (short and not self._fixed):
                self._send_away(part)
        if self.policy.device.type == "cuda" and torch.cuda.mem_get_info(self.policy.device)[0] < needed:
            torch.cuda.empty_cache()  # of the activations: the engine takes its memory from the driver

    def _send_away(self, part: Part) -> None:
        if part == "gradients":
            for buffer in self.optimizer.gradient_buffers().values():
                buffer.untyped_storage().resize_(0)
        elif part == "reference":
            self.await_reference()  # nobody else may have its memory before
            weights = self.policy.reference_weights()
            for name, tensor in weights.items():
                if name not in self._reference:  # frozen: one copy is enough
                    self._reference[name] = host_like(tensor).copy_(tensor)
            move([*weights.values()], [self._reference[name] for name in weights])
        else:
            self.optimizer.keep_on_host(part)
        self.away.add(part)

    def to_trainer(self) -> None:
        """Put the engine to sleep, and bring back what an update needs from its beginning."""
        if self._holder == "trainer":
            return
        self._holder = None  # as above
        self._peak = max(self._peak, bytes_in_use(self.policy.device))
        with self._clock("sleep"):
            self.engine.sleep()
        with self._clock("reload"):
            for buffer in self.optimizer.gradient_buffers().values():
                buffer.untyped_storage().resize_(buffer.nbytes)
            if self._reference:
                weights = self.policy.reference_weights()
                hosts = [self._reference[name] for name in weights]
                homes, self._reference_arrived = copies_on(self.policy.device, hosts, self._stream)
                move([*weights.values()], homes)
        self._holder = "trainer"

    def await_reference(self) -> None:
        """What is queued from now on sees the reference's weights."""
        if self._reference_arrived is not None:
            torch.cuda.current_stream(self.policy.device).wait_event(self._reference_arrived)
            self._reference_arrived = None

    def timings(self) -> dict[str, float]:
        """Since the last call: seconds by phase, those of all phases as `time/exchange`, and the bytes of the
        device in use at the highest, read where it changes hands."""
        seconds, peak = self._clock.seconds, max(self._peak, bytes_in_use(self.policy.device))
        self._clock, self._peak = Clock(), 0
        return seconds | {"time/exchange": sum(seconds.values()), "memory/peak_bytes": peak}


def free_bytes_on(device: torch.device) -> int:
    """What the driver has free and torch's cache holds."""
    if device.type != "cuda":
        return sys.maxsize
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
