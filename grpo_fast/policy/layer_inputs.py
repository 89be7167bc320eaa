"""Inputs of recomputed layers, which wait in the host's memory from a layer's forward for its backward.

Each leaves while its layer computes, and comes back while the layer behind computes its backward: the device
holds those of two layers, the host layers x tokens x width of a micro-batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from grpo_fast.policy.host_memory import beside, host_like, side_stream

BLOCK_BYTES = 2**24  # torch keeps free pinned memory for the next step, in sizes rounded to powers of two


class LayerInputs:
    """Checkpoints layers, one after the other, with copies on a stream of their own."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._newest: Callable[[], _Waiting | None] = lambda: None

    def checkpoint(self, layer: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
        """`torch.utils.checkpoint.checkpoint`; of what it keeps, tensors like `hidden` go to the host."""
        if not torch.is_grad_enabled():
            return layer(hidden, *args)
        self._stream = self._stream or side_stream(hidden.device)
        with saved_tensors_hooks(partial(self._pack, hidden.shape), _unpack):
            return checkpoint(layer, hidden, *args, use_reentrant=False)

    def _pack(self, shape: torch.Size, kept: Tensor) -> Tensor | _Waiting:
        if kept.shape != shape:
            return kept
        if before := self._newest():
            before.leave()  # the newest is on the device as long as none follows: the backward begins with it
        waiting = _Waiting(kept.detach(), self._stream, self._newest)
        self._newest = weakref.ref(waiting)
        return waiting


class _Waiting:
    """A layer's input on the host, and on the device while it leaves or comes."""

    def __init__(
        self, home: Tensor, stream: torch.cuda.Stream | None, before: Callable[[], _Waiting | None]
    ) -> None:
        self._home: Tensor | None = home
        self._moved: torch.cuda.Event | None = None
        self._stream, self._before = stream, before
        self._make = partial(torch.empty, home.shape, dtype=home.dtype, device=home.device)
        self._hosts = [host_like(block) for block in _blocks(home)]
        self._moved = _copy(self._hosts, _blocks(home), stream)

    def fetch(self) -> None:
        if self._home is None:
            self._home = self._make()
            self._moved = _copy(_blocks(self._home), self._hosts, self._stream)

    def leave(self) -> None:
        """Its memory is free for what the device is told from now on, which waits for the copy."""
        if self._home is not None:
            _wait(self._moved, self._home.device)
            self._home = None

    __del__ = leave  # where no backward came

    def take(self) -> Tensor:
        self.fetch()
        home: Any = self._home
        self.leave()
        if before := self._before():
            before.fetch()
        return home


def _unpack(kept: Tensor | _Waiting) -> Tensor:
    return kept.take() if isinstance(kept, _Waiting) else kept


def _blocks(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.is_meta:  # the plan's, which has no content to move
        return ()
    return tensor.reshape(-1).split(BLOCK_BYTES // tensor.itemsize)


def _copy(
    targets: Sequence[Tensor], sources: Sequence[Tensor], stream: torch.cuda.Stream | None
) -> torch.cuda.Event | None:
    """After all that the device has been told; returns the event that the copy is done."""
    with beside(stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    return None if stream is None else stream.record_event()


def _wait(event: torch.cuda.Event | None, device: torch.device) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
