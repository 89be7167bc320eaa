"""The device changes hands twice a step: the engine has it while it generates, the trainer while it updates.

    generate → engine.sleep → reload → update → offload → engine.sync → engine.wake → generate

What of the trainer no rollout reads is offloaded to the host meanwhile, as much as the engine needs room for.
Copies go through pinned buffers, made once, on a stream of their own. Offloading overlaps with the step's
records; reloading with the forward and backward of the update, for nobody reads a moment or a master before
the optimiser's step. While a tensor is offloaded it *is* its buffer on the CPU: readable, so a checkpoint
needs no reload. Buffers whose content is worth nothing, gradients between steps, are only freed.

A step that failed half-way, at an error, an interruption or for want of memory, is simply asked for again:
each may be repeated, and the engine takes over the weights before it wakes, however the update ended.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from grpo_fast.policy import Policy, PolicyOptimizer
from grpo_fast.policy.out_of_memory import is_out_of_memory
from grpo_fast.rollout.config import MemoryConfig, Part
from grpo_fast.rollout.types import Engine
from grpo_fast.run_record.logs import Clock

logger = logging.getLogger(__name__)
PARTS: tuple[Part, ...] = get_args(Part)
SMALLEST = 2**12  # bytes; smaller tensors stay: many copies for nothing
MARGIN = 2**30  # bytes left free beyond the engine's need: torch keeps cached blocks that are in part used
EVERYTHING = sys.maxsize  # more bytes than there are


class DeviceHandover:
    """Hands the device to the engine or the trainer. At first both are on it, and the engine may hold any
    weights."""

    def __init__(self, engine: Engine, policy: Policy, offloader: Offloader) -> None:
        self.engine = engine
        self.policy = policy
        self.offloader = offloader
        self._holder: Literal["engine", "trainer"] | None = None
        self._needed = 0  # bytes that the engine freed when it went to sleep, and will take again
        self._clock = Clock()

    def to_engine(self) -> None:
        """Offload what the engine has no room for, and wake it with the current weights.

        Raises:
            RuntimeError: no room even with everything offloaded, or as the engine raises it.
        """
        if self._holder == "engine":
            return
        try:
            self._wake_engine()
        except RuntimeError as error:
            may_offload_more = self.offloader.adapts and self._needed != EVERYTHING
            if not (may_offload_more and is_out_of_memory(error)):
                raise
            logger.warning(
                "no room for the engine to wake in: from now on all of the trainer's parts are offloaded"
            )
            self._needed = EVERYTHING
            self._wake_engine()
        self._holder = "engine"

    def _wake_engine(self) -> None:
        with self._clock("offload"):
            self.start_offload()
            self.offloader.finish_offload()
            if self._needed and self.policy.device.type == "cuda":
                torch.cuda.empty_cache()  # of the activations: the engine takes its memory from the driver
        with self._clock("sync"):
            self.engine.sync(self.policy)
        with self._clock("wake"):
            self.engine.wake()

    def start_offload(self) -> None:
        """The update is over: the copies start now, beside whatever else there is to do until `to_engine`."""
        self.offloader.start_offload(self._needed)

    def to_trainer(self) -> None:
        """Put the engine to sleep and start to reload everything of the trainer's."""
        if self._holder == "trainer":
            return
        self._holder = "trainer"  # first: whatever of this fails, `to_engine` does everything
        with self._clock("sleep"):
            awake = sum(self.engine.memory().values())
            self.engine.sleep()
            self._needed = max(self._needed, awake - sum(self.engine.memory().values()))
        with self._clock("reload"):
            self.offloader.start_reload()

    def seconds(self) -> dict[str, float]:
        """Seconds since the last call, by phase, and as `time/exchange` those of all phases."""
        seconds, self._clock = self._clock.seconds, Clock()
        return seconds | {"time/exchange": sum(seconds.values())}


def trainer_offloader(policy: Policy, optimizer: PolicyOptimizer, config: MemoryConfig) -> Offloader:
    """For the parts of a trainer that no rollout reads. The weights stay: an engine may share them."""
    return Offloader(
        {
            "gradients": optimizer.gradient_buffers,
            "optimizer": optimizer.moments,
            "master": optimizer.masters,
            "reference": policy.reference_weights,
        },
        device=policy.device,
        offload=() if config.offload == "none" else config.offload,
    )


class Offloader:
    """Moves parts of the trainer off the device and back, to the bit.

    Args:
        parts: for each part its tensors by name, asked for at every move: moments appear with the first step.
        device: where the parts work.
        offload: the parts to offload; "auto": those it takes to make room, which is none on a CPU.
        free_bytes: what the device has left for anybody; None: as CUDA says.
    """

    def __init__(
        self,
        parts: Mapping[Part, Callable[[], Mapping[str, Tensor]]],
        *,
        device: torch.device,
        offload: Literal["auto"] | Sequence[Part],
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.smallest = SMALLEST
        self.adapts = offload == "auto"  # the parts are chosen by the room that is needed
        self._parts = parts
        self._device = device
        self._offload = PARTS if offload == "auto" else offload
        self._free_bytes = free_bytes or partial(free_bytes_on, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: dict[str, Tensor] = {}  # on the CPU, by part and name
        self._moving: list[tuple[Tensor, Tensor]] = []  # (tensor, its buffer): being copied, or offloaded
        self._freed: list[tuple[Tensor, int]] = []  # (tensor, bytes of its storage)
        self._reloaded: torch.cuda.Event | None = None

    def start_offload(self, needed: int = 0) -> None:
        """Start the copies to the host, unless they are under way.

        Args:
            needed: bytes that the engine will take; "auto" makes so many free, and `MARGIN` besides.
        """
        if len(self._offloaded()) < len(self._moving):
            return
        self.await_reload()
        copying: list[tuple[Tensor, Tensor]] = []
        missing = needed + MARGIN - self._free_bytes() if needed else 0
        for part in PARTS:
            if part not in self._offload or (self.adapts and missing <= 0):
                continue
            tensors = self._on_device(part)
            missing -= sum(tensor.nbytes for tensor in tensors.values())
            for name, tensor in tensors.items():
                if part == "gradients":
                    self._freed.append((tensor, tensor.untyped_storage().nbytes()))
                    tensor.untyped_storage().resize_(0)
                else:
                    copying.append((tensor, self._buffer(f"{part}.{name}", tensor)))
        with self._on_stream():
            for tensor, buffer in copying:
                buffer.copy_(tensor.detach(), non_blocking=True)
        self._moving = [*self._moving, *copying]  # last: what was interrupted starts anew

    def finish_offload(self) -> None:
        """Wait for the copies, and let go of the device's memory: it is in the allocator's cache then."""
        if self._stream is not None:
            self._stream.synchronize()
        for tensor, buffer in self._moving:
            tensor.data = buffer

    def start_reload(self) -> None:
        """Start to copy everything back. `await_reload` makes the current stream wait for it."""
        for tensor, size in self._freed:
            tensor.untyped_storage().resize_(size)
        self._freed = []
        offloaded = self._offloaded()
        homes = [torch.empty_like(buffer, device=self._device) for _, buffer in offloaded]
        with self._on_stream():
            for home, (_, buffer) in zip(homes, offloaded, strict=True):
                home.copy_(buffer, non_blocking=True)
        for home, (tensor, _) in zip(homes, offloaded, strict=True):
            tensor.data = home
        self._moving = []
        if self._stream is not None:
            self._reloaded = self._stream.record_event()

    def reload_if_room(self) -> None:
        """`start_reload` while the engine still has its memory, where the device holds both."""
        if self.offloaded_bytes() and self.offloaded_bytes() + MARGIN <= self._free_bytes():
            self.start_reload()

    def await_reload(self) -> None:
        """What is queued from now on sees the reloaded content."""
        if self._reloaded is not None:
            torch.cuda.current_stream(self._device).wait_event(self._reloaded)
            self._reloaded = None

    def offloaded_bytes(self) -> int:
        """Bytes that are not on the device now."""
        return sum(buffer.nbytes for _, buffer in self._offloaded()) + sum(size for _, size in self._freed)

    def _offloaded(self) -> list[tuple[Tensor, Tensor]]:
        return [pair for pair in self._moving if pair[0].data_ptr() == pair[1].data_ptr()]

    def _on_device(self, part: Part) -> dict[str, Tensor]:
        """Tensors of the part that are on the device and worth a copy."""
        tensors = self._parts[part]() if part in self._parts else {}
        offloaded = {buffer.data_ptr() for _, buffer in self._moving}
        return {
            name: tensor
            for name, tensor in tensors.items()
            if tensor.untyped_storage().nbytes() >= self.smallest and tensor.data_ptr() not in offloaded
        }

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        """Pinned where there is CUDA; made once, for pinning is slow."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[name] = host_buffer(tensor, pinned=self._stream is not None)
        return buffer

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Copies in here see what is queued so far, and hold up nothing that is queued later."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


def host_buffer(tensor: Tensor, *, pinned: bool) -> Tensor:
    """Empty memory like `tensor` on the CPU; not pinned where the host has no more of that to give."""
    if pinned:
        try:
            return torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        except RuntimeError as error:
            logger.warning(
                "no pinned memory for %.2f GiB of the trainer (%s): it moves through ordinary memory, slower",
                tensor.nbytes / 2**30,
                str(error).partition("\n")[0],
            )
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


def free_bytes_on(device: torch.device) -> int:
    """What the driver has free and torch's cache holds."""
    if device.type != "cuda":
        return sys.maxsize
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
