"""Hand the device's memory to the engine for the rollout and to the trainer for the update.

    make room → engine.sync → engine.wake → generate → engine.sleep → update

The engine sleeps as soon as it is made, before masters and moments are allocated. For a rollout, parts of the
trainer make as much room as the engine needs. Moments and masters stay on the host and visit the device in
the optimizer's step only. The reference returns for the update; gradient buffers are only freed.

Each step may be repeated after an error or an interruption: the engine syncs before it wakes.
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
MARGIN = 2**30  # bytes left free beyond the engine's need, as torch's cache is fragmented


class DeviceHandover:
    """Switches the device between the engine, which it puts to sleep, and the trainer.

    `config` names the parts that are always offloaded. With `auto`, others follow where room is short; `away`
    has all offloaded parts.
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
        self._reference: dict[str, Tensor] = {}  # copies on the host, by name
        self._reference_arrived: torch.cuda.Event | None = None
        self._clock, self._peak = Clock(), 0
        engine.sleep()

    def to_engine(self) -> None:
        """Make room, and wake the engine with the current weights.

        Raises:
            RuntimeError: no room even with everything offloaded, or as the engine.
        """
        if self._holder == "engine":
            return
        self._holder = None  # after a failure, either direction runs in full
        self._peak = max(self._peak, bytes_in_use(self.policy.device))
        needed: float = self.engine.freed()
        while not self._woken(needed):
            if self._can_offload_more(needed):
                logger.warning(
                    "the engine has no room to wake in: from now on the trainer offloads all it can"
                )
                needed = math.inf
            else:
                self.engine.shrink()  # type: ignore[attr-defined]
                needed = self.engine.freed()
        self._holder = "engine"

    def _can_offload_more(self, needed: float) -> bool:
        return needed < math.inf and not (self._fixed or self.away.issuperset(PARTS))

    def _woken(self, needed: float) -> bool:
        """Wake the engine; return False without room, if the trainer or the engine can take less."""
        try:
            with self._clock("offload"):
                self._make_room(needed)
            with self._clock("sync"):
                self.engine.sync(self.policy)
            with self._clock("wake"):
                self.engine.wake()
        except RuntimeError as error:
            can_take_less = self._can_offload_more(needed) or getattr(self.engine, "can_shrink", False)
            if not (can_take_less and is_out_of_memory(error)):
                raise
            return False
        return True

    def _make_room(self, needed: float) -> None:
        """Offload the parts in `away`, and further ones until `needed` bytes are free."""
        for part in PARTS:
            short = needed and free_bytes_on(self.policy.device) < needed + MARGIN
            if part in self.away or (short and not self._fixed):
                self._send_away(part)
        if self.policy.device.type == "cuda" and torch.cuda.mem_get_info(self.policy.device)[0] < needed:
            torch.cuda.empty_cache()  # the engine allocates from the driver

    def _send_away(self, part: Part) -> None:
        if part == "gradients":
            for buffer in self.optimizer.gradient_buffers().values():
                buffer.untyped_storage().resize_(0)
        elif part == "reference":
            self.await_reference()  # its memory is in use until then
            weights = self.policy.reference_weights()
            for name, tensor in weights.items():
                if name not in self._reference:  # frozen weights are copied once
                    self._reference[name] = host_like(tensor).copy_(tensor)
            move([*weights.values()], [self._reference[name] for name in weights])
        else:
            self.optimizer.keep_on_host(part)
        self.away.add(part)

    def to_trainer(self) -> None:
        """Put the engine to sleep, and restore gradient buffers and the reference."""
        if self._holder == "trainer":
            return
        self._holder = None
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
        """Make kernels that are queued from now on wait for the reference's weights."""
        if self._reference_arrived is not None:
            torch.cuda.current_stream(self.policy.device).wait_event(self._reference_arrived)
            self._reference_arrived = None

    def timings(self) -> dict[str, float]:
        """Return since the last call the seconds by phase, their sum `time/exchange`, and the peak memory.

        The peak is that of the readings at each handover.
        """
        seconds, peak = self._clock.seconds, max(self._peak, bytes_in_use(self.policy.device))
        self._clock, self._peak = Clock(), 0
        return seconds | {"time/exchange": sum(seconds.values()), "memory/peak_bytes": peak}


def free_bytes_on(device: torch.device) -> int:
    """Return the bytes that the driver and torch's cache have free."""
    if device.type != "cuda":
        return sys.maxsize
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
