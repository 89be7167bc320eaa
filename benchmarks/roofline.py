"""Arithmetic intensity and achieved rates of measurements, and the roof that the same run measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from .contest import BYTES, FLOPS
from .problem import DTYPES, FORWARD, Setting
from .record import Measurement, Record


@dataclass(frozen=True)
class Roof:
    """What the device did at best."""

    flops: float  # per second
    bytes: float  # per second


@dataclass(frozen=True)
class Point:
    name: str
    intensity: float  # FLOPs per byte
    flops: float  # per second


def roof_of(record: Record) -> Roof | None:
    """The fastest product and the copy of the run; None where it measured none."""
    flops = [cell.ceilings[FLOPS] for cell in record.cells if FLOPS in cell.ceilings]
    flops += [
        _product_flops(cell) / cell.ceilings["product_seconds"]
        for cell in record.cells
        if "product_seconds" in cell.ceilings
    ]
    copies = [cell.ceilings[BYTES] for cell in record.cells if BYTES in cell.ceilings]
    copies.append(1e9 * record.environment.get("copy_gigabytes_per_second", 0.0))
    return Roof(max(flops), max(copies)) if flops and max(copies) > 0 else None


def points(cells: Sequence[Measurement]) -> list[Point]:
    """Of the measurements whose work is known: it is in their metrics, or follows from a head's shape."""
    found = []
    for cell in cells:
        if cell.metrics.get(BYTES) and cell.metrics.get(FLOPS):
            intensity = cell.metrics[FLOPS] / cell.metrics[BYTES]
            found.append(Point(cell.implementation, intensity, cell.metrics[FLOPS]))
        elif cell.time is not None and "product_seconds" in cell.ceilings:
            setting = _setting(cell)
            rate = setting.flops / (cell.time.median / 1e3)
            found.append(Point(cell.implementation, setting.flops / least_bytes(setting), rate))
    return found


def least_bytes(setting: Setting) -> float:
    """Inputs read once and results written once: what no implementation of the head avoids."""
    size = torch.empty(0, dtype=DTYPES[setting.dtype]).element_size()
    hidden, weight = setting.tokens * setting.hidden * size, setting.vocabulary * setting.hidden * size
    gradients = 0 if setting.mode == FORWARD else hidden + setting.trainable * weight
    return hidden + weight + gradients + (8 + 4) * setting.tokens  # targets in, log-probabilities out


def _setting(cell: Measurement) -> Setting:
    """Of a shape that may say more."""
    return Setting(
        **{part.name: cell.shape[part.name] for part in fields(Setting) if part.name in cell.shape}
    )


def _product_flops(cell: Measurement) -> float:
    setting = _setting(cell)
    return 2.0 * setting.tokens * setting.hidden * setting.vocabulary
