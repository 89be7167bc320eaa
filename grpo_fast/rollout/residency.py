"""What of the trainer leaves the device while the engine generates, and comes back as it was.

Copies go through pinned buffers, made once, on a stream of their own. On the way out they overlap with what
is written down about the step; on the way back with the forward and backward of the update, for nobody reads
a moment or a master before the optimiser's step. While a tensor is away it *is* its buffer on the CPU:
readable, so a checkpoint needs no reload. Buffers whose content is worth nothing, gradients between steps,
are only freed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
Part = Literal["gradients", "optimizer", "master", "reference"]
# In the order in which they leave when not all need to: what costs least to move first.
PARTS: tuple[Part, ...] = ("gradients", "optimizer", "master", "reference")
SMALLEST = 2**12  # bytes; smaller tensors stay: many copies for nothing
ROOM = 2**30  # bytes left free beyond what is asked for: blocks that are cached in pieces are not given back

Tensors = Callable[[], Mapping[str, Tensor]]


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


class Residency:
    """Moves parts of the trainer off the device and back, to the bit. Every move may be repeated.

    Args:
        parts: for each part its tensors by name, asked for at every move: moments appear with the first step.
        device: where the parts work.
        offload: the parts that leave; "auto": those it takes to make room, which is none on a CPU.
        free_bytes: what the device has left for anybody; None: as CUDA says.
        smallest: bytes below which a tensor stays.
    """

    def __init__(
        self,
        parts: Mapping[Part, Tensors],
        *,
        device: torch.device,
        offload: Literal["auto"] | Sequence[Part],
        free_bytes: Callable[[], int] | None = None,
        smallest: int = SMALLEST,
    ) -> None:
        self._parts = parts
        self._device = device
        self._offload = offload
        self._cuda = device.type == "cuda"
        self._free_bytes = free_bytes or self._free_on_device
        self._smallest = smallest
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._buffers: dict[str, Tensor] = {}  # on the CPU
        self._leaving: list[tuple[Tensor, Tensor]] = []  # (tensor, its buffer), copies under way
        self._away: list[tuple[Tensor, Tensor]] = []
        self._freed: dict[int, tuple[Tensor, int]] = {}  # storage's bytes
        self._returned: torch.cuda.Event | None = None

    @property
    def adapts(self) -> bool:
        """Whether what leaves depends on the room that is needed."""
        return self._offload == "auto"

    def leave(self, needed: int = 0) -> None:
        """Begin to copy what leaves, unless that is under way; what `release` then frees.

        Args:
            needed: bytes that the engine will take; "auto" makes so many free, and `ROOM` besides.
        """
        if self._leaving:
            return
        self.ready()
        leaving: list[tuple[Tensor, Tensor]] = []
        for part in self._chosen(needed):
            tensors = {f"{part}.{name}": tensor for name, tensor in self._movable(part).items()}
            if part == "gradients":
                for tensor in tensors.values():
                    self._freed[id(tensor)] = (tensor, tensor.untyped_storage().nbytes())
                    tensor.untyped_storage().resize_(0)
            else:
                leaving += [(tensor, self._buffer(name, tensor)) for name, tensor in tensors.items()]
        with self._on_stream():
            for tensor, buffer in leaving:
                buffer.copy_(tensor.detach(), non_blocking=True)
        self._leaving = leaving  # last: an interrupted departure begins anew

    def release(self) -> None:
        """Wait for the copies, and let go of the memory: it is in the allocator's cache then."""
        if self._stream is not None:
            self._stream.synchronize()
        while self._leaving:
            pair = self._leaving.pop()
            self._away.append(pair)  # first, so that an interruption in between loses nothing
            pair[0].data = pair[1]

    def fetch(self) -> None:
        """Begin to copy everything back. `ready` makes the current stream wait for it."""
        self._leaving = []
        for tensor, size in self._freed.values():
            tensor.untyped_storage().resize_(size)
        self._freed = {}
        pairs = [(torch.empty_like(buffer, device=self._device), buffer) for _, buffer in self._away]
        with self._on_stream():
            for home, buffer in pairs:
                home.copy_(buffer, non_blocking=True)
        for (tensor, buffer), (home, _) in zip(self._away, pairs, strict=True):
            if tensor.data_ptr() == buffer.data_ptr():  # else an interrupted move had not reached it
                tensor.data = home
        self._away = []
        if self._stream is not None:
            self._returned = self._stream.record_event()

    def fetch_if_room(self) -> None:
        """The same before the engine has left, where the device holds both."""
        if self.away_bytes() and self.away_bytes() + ROOM <= self._free_bytes():
            self.fetch()

    def ready(self) -> None:
        """What is queued from now on sees the content of what came back."""
        if self._returned is not None:
            torch.cuda.current_stream(self._device).wait_event(self._returned)
            self._returned = None

    def away_bytes(self) -> int:
        """Bytes that are not on the device now."""
        return sum(buffer.nbytes for _, buffer in self._away) + sum(n for _, n in self._freed.values())

    def _chosen(self, needed: int) -> list[Part]:
        if not self.adapts:
            return [part for part in PARTS if part in self._offload]
        chosen: list[Part] = []
        missing = needed + ROOM - self._free_bytes() if needed else 0
        for part in PARTS:
            if missing <= 0:
                break
            if size := sum(tensor.nbytes for tensor in self._movable(part).values()):
                chosen.append(part)
                missing -= size
        return chosen

    def _movable(self, part: Part) -> dict[str, Tensor]:
        """Tensors of the part that are on the device and worth a copy."""
        if part not in self._parts:
            return {}
        away = {buffer.data_ptr() for _, buffer in self._away}
        return {
            name: tensor
            for name, tensor in self._parts[part]().items()
            if tensor.untyped_storage().nbytes() >= self._smallest and tensor.data_ptr() not in away
        }

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        """Pinned where there is CUDA; made once, for pinning is slow."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[name] = host_buffer(tensor, pinned=self._cuda)
        return buffer

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Copies in here see what is queued so far, and hold up nothing that is queued later."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _free_on_device(self) -> int:
        if not self._cuda:
            return sys.maxsize
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + cached
