"""Which cells are measured by default on a device, and which first: a short run measures what matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from .goals import is_goal
from .losses import LOSSES
from .problem import FORWARD, MODES, Setting


@dataclass(frozen=True)
class Grid:
    """The axes, each with its most telling value first."""

    rows: tuple[str, ...]
    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    vocabulary: tuple[int, ...]
    modes: tuple[str, ...]
    trainable: tuple[bool, ...]
    dtype: str
    losses: tuple[str, ...] = LOSSES
    losses_at_all_sizes: bool = False  # or those after the first at the first sizes alone


def default_grid(device_kind: str, rows: tuple[str, ...]) -> Grid:
    if device_kind == "cuda":
        return Grid(
            rows=rows,
            tokens=(16_384, 4096, 65_536, 1024),
            hidden=(2048, 4096, 896, 1536),
            vocabulary=(151_936, 128_256, 32_000, 262_144),
            modes=MODES,
            trainable=(True, False),
            dtype="bfloat16",
        )
    return Grid(rows, (256,), (128,), (4096, 8000), MODES, (True, False), "float32")


def cells(grid: Grid, real_shape: tuple[int, int] | None) -> list[Setting]:
    """All settings, the design's goal rows first, then by distance from the first value of every axis.

    Every other loss counts as next to the first: they differ in little but the end.

    Args:
        real_shape: (V, H) of the model whose own rows were given; "real" has no others.
    """
    ranked: dict[Setting, tuple[bool, int]] = {}
    sizes = (grid.tokens, grid.hidden, grid.vocabulary)
    axes = (grid.rows, grid.modes, grid.trainable, *sizes, grid.losses)
    for *places, loss in product(*(range(len(axis)) for axis in axes)):
        if loss and any(places[3:]) and not grid.losses_at_all_sizes:
            continue
        rows, mode, trainable, tokens, hidden, vocabulary = _pick(axes[:-1], places)
        if rows == "real":
            vocabulary, hidden = real_shape
        trainable = trainable or mode == FORWARD
        setting = Setting(rows, tokens, hidden, vocabulary, mode, trainable, grid.dtype, grid.losses[loss])
        rank = (not is_goal(setting), sum(places) + bool(loss))
        ranked[setting] = min(rank, ranked.get(setting, rank))
    return sorted(ranked, key=ranked.get)


def _pick(axes: Sequence[Sequence], places: Sequence[int]) -> list:
    return [axis[place] for axis, place in zip(axes, places, strict=True)]
