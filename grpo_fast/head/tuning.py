"""Block sizes, warps and stages of every kernel, by architecture and shape: checked-in tables, no autotuning.

A table is `tables/sm_XX.json` or `gfxXXX.json`, written by `python -m benchmarks.tune` on a GPU of that
architecture. Reading one is a pure function of the architecture and the shape, so a user's first step
compiles exactly what its plan names. `measured` says which rules rest on a measurement and which were carried
over.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError

from grpo_fast.kernels import TILE, ProductTile, SparseConfig

TABLES = Path(__file__).resolve().parent / "tables"
SHARED_MEMORY = {
    "sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448,
    "sm_120": 101_376, "gfx942": 65_536, "gfx950": 163_840,
}  # fmt: skip
"""Bytes of shared memory one program may use, by architecture: NVIDIA's in ascending order, then AMD's."""

Precision = Literal["half", "float32"]


@dataclass(frozen=True)
class Sizes:
    """What the kernels of one class of shapes are launched with."""

    wide: ProductTile | None  # X Wᵀ by tensor descriptors; None: the architecture has none
    narrow: ProductTile | None  # the same, where a softcap or many statistics need the registers
    pointer_forward: ProductTile  # operands that no descriptor can address
    pointer_backward: ProductTile
    sparse: SparseConfig


@dataclass(frozen=True)
class Rule:
    """The sizes of a class of shapes; None: any."""

    precision: Precision
    hidden_up_to: int | None
    trainable: bool | None  # whether the head's weight takes a gradient
    measured: bool
    sizes: Sizes

    def fits(self, precision: Precision, hidden: float, trainable: bool) -> bool:
        of_hidden = self.hidden_up_to is None or hidden <= self.hidden_up_to
        return self.precision == precision and of_hidden and self.trainable in (None, trainable)

    @property
    def rank(self) -> tuple[str, float, bool, bool]:
        """Sorts the most particular rule of a precision first."""
        up_to = float("inf") if self.hidden_up_to is None else self.hidden_up_to
        return self.precision, up_to, self.trainable is None, bool(self.trainable)


@dataclass(frozen=True)
class Table:
    """All rules of an architecture; the first that fits applies."""

    architecture: str  # sm_90 for compute capability 9.0, else as ROCm names it
    provenance: dict[str, str]
    rules: tuple[Rule, ...]

    def sizes(self, precision: Precision, hidden: int, trainable: bool) -> Sizes:
        return next(rule.sizes for rule in self.rules if rule.fits(precision, hidden, trainable))


def sizes_for(
    architecture: str,
    dtype: torch.dtype,
    hidden: int,
    trainable: bool,
    shared_memory: int | None = None,
) -> Sizes:
    """The sizes for a device and a shape.

    An NVIDIA GPU without a table of its own takes that of the newest architecture before it whose shared
    memory it has; where there is none, the table that needs the least.

    Args:
        architecture: as a table's; the plan of a device that has no kernels reads it as one without a table.
        hidden: H.
        trainable: whether the head's weight takes a gradient.
        shared_memory: bytes one program may use; None: as much as any table asks for.
    """
    table = load_tables()[_nearest(architecture, shared_memory)]
    return table.sizes("half" if dtype.itemsize == 2 else "float32", hidden, trainable)


def _nearest(architecture: str, shared_memory: int | None) -> str:
    """The architecture whose table is taken."""
    nvidia = {int(name[3:]): name for name in SHARED_MEMORY if name.startswith("sm_")}
    if architecture.startswith("gfx"):
        fits = [architecture] if architecture in SHARED_MEMORY else []
    else:
        room = max(SHARED_MEMORY.values()) if shared_memory is None else shared_memory
        before = [name for number, name in nvidia.items() if number <= int(architecture[3:])]
        fits = [name for name in before if SHARED_MEMORY[name] <= room]
    return fits[-1] if fits else min(nvidia.values(), key=SHARED_MEMORY.__getitem__)


@functools.cache
def load_tables() -> dict[str, Table]:
    """All tables by architecture.

    Raises:
        ValueError: a table that no launch could use; the message names the file and what is wrong.
    """
    tables = (read_table(path) for path in sorted(TABLES.glob("*.json")))
    return {table.architecture: table for table in tables}


def read_table(path: Path) -> Table:
    """One table, checked.

    Raises:
        ValueError: as `load_tables`.
    """
    text = path.read_text()
    try:
        table = TypeAdapter(Table).validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{path} is no tuning table: {error}") from error
    if plain(table) != json.loads(text):
        raise ValueError(f"{path} has keys that nothing reads, or values of another type: write it by `tune`")
    if wrong := faults(table, path.stem):
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    return table


def plain(table: Table) -> dict[str, Any]:
    """What `json` writes and reads back."""
    return json.loads(json.dumps(asdict(table)))


def faults(table: Table, name: str) -> list[str]:
    """What keeps a table from use; empty when nothing does."""
    found = []
    if name != table.architecture or table.architecture not in SHARED_MEMORY:
        found.append(f"architecture {table.architecture} in {name}")
    if list(table.rules) != sorted(table.rules, key=lambda rule: rule.rank):
        found.append("rules are not sorted: the most particular must come first")
    for precision in ("half", "float32"):
        if not any(r.fits(precision, float("inf"), t) for r in table.rules for t in (True, False)):
            found.append(f"no rule for every {precision} shape")
    for rule in table.rules:
        for name in ("wide", "narrow", "pointer_forward", "pointer_backward"):
            tile = getattr(rule.sizes, name)
            wrong = [] if tile is None else _tile_faults(tile, name, rule.precision, table.architecture)
            found += [f"{rule.precision} {name}: {fault}" for fault in wrong]
    return found


def _tile_faults(tile: ProductTile, name: str, precision: Precision, architecture: str) -> list[str]:
    found = []
    sizes = (tile.rows, tile.columns, tile.depth)
    held = replace(tile, stages=tile.stages - architecture.startswith("gfx"))  # AMD has one in registers
    needed, room = held.shared_bytes(2 if precision == "half" else 4), SHARED_MEMORY.get(architecture, 0)
    if tile.descriptors != (name in ("wide", "narrow")):
        found.append(f"descriptors is {tile.descriptors}")
    if tile.columns % TILE or any(n & (n - 1) or n < 1 for n in sizes):
        found.append(f"rows, columns and depth must be powers of two, columns at least {TILE}")
    if needed > room:
        found.append(f"operands need {needed} of {room} bytes")
    return found
