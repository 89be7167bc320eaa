"""What the shapes of a record have in common, what tells them apart, and how a person reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .accuracy import GRADIENT_LIMIT, LOGPROB_LIMIT, LOSS_LIMIT
from .losses import NAMES
from .record import OK, Measurement

Shape = dict[str, Any]
LETTERS = {"tokens": "N", "hidden": "H", "vocabulary": "V"}
LIMITS = {"logprob": LOGPROB_LIMIT, "loss": LOSS_LIMIT,
          "hidden_gradient": GRADIENT_LIMIT, "weight_gradient": GRADIENT_LIMIT}  # fmt: skip
_FLAGS = {"trainable": ("trainable head", "frozen head")}


@dataclass(frozen=True)
class Slice:
    """The measurements that differ in one number of their shape, and in the implementation."""

    axis: str
    fixed: Shape
    cells: list[Measurement]


def is_wrong(cell: Measurement) -> bool:
    """Beyond what rounding explains, NaN included."""
    return any(not error <= LIMITS[name] for name, error in cell.accuracy.items() if name in LIMITS)


def shapes_of(cells: Sequence[Measurement]) -> list[Shape]:
    """Each once, in the order of the measurements."""
    found: list[Shape] = []
    for cell in cells:
        if cell.shape not in found:
            found.append(cell.shape)
    return found


def conclusions(cells: Sequence[Measurement]) -> list[Measurement]:
    """What follows from the others, like fitted exponents: it stands where nothing was timed."""
    timed = shapes_of([cell for cell in cells if cell.time is not None])
    return [cell for cell in cells if cell.status == OK and cell.metrics and cell.shape not in timed]


def split_axes(cells: Sequence[Measurement]) -> tuple[Shape, list[str]]:
    """What all shapes agree on, and the names of the rest."""
    shapes = shapes_of(cells)
    names = list(dict.fromkeys(name for shape in shapes for name in shape))
    varying = [name for name in names if any(s.get(name) != shapes[0].get(name) for s in shapes)]
    return {name: shapes[0].get(name) for name in names if name not in varying}, varying


def label(shape: Shape, names: Sequence[str] | None = None) -> str:
    """`forward + backward, peaked rows, N 16,384, H 2,048`: of these names, or of all."""
    values = {name: shape[name] for name in (names if names is not None else shape) if name in shape}
    if values.get("mode") == "forward":
        values.pop("trainable", None)
    words = (_words(name, value) for name, value in values.items())
    return ", ".join(word for word in words if word)


def _words(name: str, value: object) -> str:
    """Nothing for what is not there."""
    if name in _FLAGS:
        return _FLAGS[name][0 if value else 1]
    if value is None or isinstance(value, bool):
        return name.replace("_", " ") if value else ""
    if name in ("mode", "dtype", "model"):
        return str(value).replace("_", " + ")
    if name == "rows":
        return f"{value} rows"
    if name == "loss":
        return NAMES.get(value, str(value))
    return f"{LETTERS.get(name, name.replace('_', ' '))} {number(value)}"


def number(value: object) -> str:
    """Three digits of a float, all of a whole number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def slices(cells: Sequence[Measurement], axis: str) -> list[Slice]:
    """Groups that vary along one numeric axis alone, with at least two values of it; the longest first."""
    groups: dict[str, list[Measurement]] = {}
    for cell in cells:
        value = cell.shape.get(axis)
        if isinstance(value, int | float) and not isinstance(value, bool):
            groups.setdefault(repr(_without(cell.shape, axis)), []).append(cell)
    found = [Slice(axis, _without(members[0].shape, axis), members) for members in groups.values()]
    long = [group for group in found if _values(group) > 1]
    return sorted(long, key=lambda group: -_values(group))


def _values(group: Slice) -> int:
    return len({cell.shape[group.axis] for cell in group.cells})


def _without(shape: Shape, axis: str) -> Shape:
    return {name: value for name, value in shape.items() if name != axis}
