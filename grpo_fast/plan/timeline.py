"""The bytes alive after every allocation of an update, as a line in the sizes of its batch.

The update runs on the meta device at three small sizes. It makes the same allocations each time, and each of
them grows linearly with the input tokens T and the targets N: three runs tell its line. Whatever the size of
a real batch, its peak is then one product with a matrix, and no architecture needs formulas of its own.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_fast.plan.stand_ins import Symbol

SYMBOLS: tuple[Symbol, ...] = get_args(Symbol)


@dataclass(frozen=True)
class Event:
    """Storage that appears (sign 1) or goes (sign -1)."""

    sign: int
    bytes: int
    symbol: Symbol | None = None  # then it stands for that column instead of bytes
    sum: bool = False  # of two tensors of one size


class Recorder(TorchDispatchMode):
    """Follows every storage that operators make, from the first tensor on it to the last.

    Args:
        known: tensors that are there already and do not count.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._known = known  # keeps their storages, and so their keys, alive
        self._seen: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf, sum=func is torch.ops.aten.add.Tensor)
        return result

    def symbol(self, column: Symbol) -> Tensor:
        """A tensor that counts as the column's bytes."""
        before = len(self.events)
        tensor = torch.empty(1, device="meta")
        self.events[before] = Event(1, 0, column)
        self._follow(tensor.untyped_storage(), 0, column)
        return tensor

    def _note(self, tensor: Tensor, *, sum: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self.events.append(Event(1, storage.nbytes(), sum=sum))
            self._follow(storage, storage.nbytes(), None)

    def _follow(self, storage: torch.UntypedStorage, size: int, column: Symbol | None) -> None:
        def gone(_: object, key: int = storage._cdata) -> None:
            self._seen.pop(key, None)
            self.events.append(Event(-1, size, column))

        self._seen[storage._cdata] = weakref.ref(storage, gone)


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Record what operators allocate in here, besides the model's own tensors."""
    recorder = Recorder([*model.parameters(), *model.buffers()])
    enabled = gc.isenabled()
    gc.disable()  # what a collection frees, and when, would differ from run to run
    try:
        with recorder:
            yield recorder
    finally:
        if enabled:
            gc.enable()


def added_in_place(events: list[Event]) -> list[Event]:
    """The events of a backward as they are when nobody watches.

    Autograd adds a gradient into the one that it holds already, unless a dispatch mode is active: then it
    makes a new tensor, and lets go of the old one at once.
    """
    kept: list[Event] = []
    for event in events:
        last = kept[-1] if kept else None
        if last is not None and last.sum and (event.sign, event.bytes) == (-1, last.bytes):
            kept.pop()
        else:
            kept.append(event)
    return kept


Run = Callable[[int, int], tuple[list[Event], int]]
"""(T, N) -> the events of a batch of these sizes, and how many of them the forward made."""


def repeated(short: Run, long: Run, times: int) -> Run:
    """The events of a model with `times` layers more than that of `short`, and `long` has one more.

    Raises:
        Irregular: on a call, where the layer more does not show as a block that could be repeated.
    """

    def run(tokens: int, targets: int) -> tuple[list[Event], int]:
        (less, less_end), (more, more_end) = short(tokens, targets), long(tokens, targets)
        forward = _with_blocks(less[:less_end], more[:more_end], times)
        return forward + _with_blocks(less[less_end:], more[more_end:], times), len(forward)

    return run


class Irregular(Exception):
    """Layers that differ in what they allocate."""


def _with_blocks(short: list[Event], long: list[Event], times: int) -> list[Event]:
    pairs = enumerate(zip(short, long, strict=False))
    start = next((i for i, (one, other) in pairs if one != other), len(short))
    block = long[start : start + len(long) - len(short)]
    if short[:start] + block + short[start:] != long:
        raise Irregular
    return short[:start] + block * times + short[start:]


@dataclass(frozen=True)
class Timeline:
    """Bytes alive after each event: `base` + `per_token`·T + `per_target`·N + the symbols' columns."""

    base: np.ndarray  # (E,)
    per_token: np.ndarray
    per_target: np.ndarray
    symbols: Mapping[Symbol, np.ndarray]  # how many of each are alive
    forward_end: int  # the event after which the backward begins

    def live(self, tokens: float, targets: float, symbols: Mapping[Symbol, float]) -> np.ndarray:
        """(E,) bytes alive after each event."""
        alive = self.base + self.per_token * tokens + self.per_target * targets
        for name, size in symbols.items():
            alive = alive + self.symbols[name] * size
        return alive

    @classmethod
    def fit(cls, run: Run) -> Timeline:
        """From three runs.

        Raises:
            RuntimeError: the events depend on the sizes by more than their bytes.
        """
        points = ((64, 32), (128, 32), (64, 96))
        runs = [run(*point) for point in points]
        (events, forward_end), *others = runs
        pattern = [(event.sign, event.symbol) for event in events]
        for other, _ in others:
            if [(event.sign, event.symbol) for event in other] != pattern:
                raise RuntimeError("this model allocates differently for batches of different sizes")
        sizes = np.array([[event.sign * event.bytes for event in found] for found, _ in runs], dtype=float)
        system = np.array([(1, *point) for point in points], dtype=float)
        base, per_token, per_target = np.cumsum(np.linalg.solve(system, sizes), axis=1)
        symbols = {
            name: np.cumsum([event.sign * (event.symbol == name) for event in events]) for name in SYMBOLS
        }
        return cls(base, per_token, per_target, symbols, forward_end)
