"""What a person reads of measurements: one table a shape."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .record import OK, Measurement
from .timing import Spread

DASH = "\N{EN DASH}"
_RATES = {  # metric -> column, divisor
    "flops_per_second": ("TFLOP/s", 1e12),
    "bytes_per_second": ("GB/s", 1e9),
    "tokens_per_second": ("tokens/s", 1.0),
    "share_of_ceiling": ("of ceiling", 1.0),
}


def print_measurements(screen: Console, found: Sequence[Measurement]) -> None:
    """Nothing for no measurements."""
    for table in measurement_tables(found):
        screen.print(table)
        screen.print()


def measurement_tables(found: Sequence[Measurement]) -> list[Table]:
    """One for each shape, in the order of the measurements."""
    shapes: dict[str, list[Measurement]] = {}
    for one in found:
        shapes.setdefault(title_of(one), []).append(one)
    return [_table(title, members) for title, members in shapes.items()]


def title_of(one: Measurement) -> str:
    return ", ".join(f"{_words(name)} {_value(value)}" for name, value in one.shape.items())


def _table(title: str, members: Sequence[Measurement]) -> Table:
    table = Table(title=title)
    table.add_column("implementation", overflow="fold")
    timed = any(one.time for one in members)
    rates = [name for name in _RATES if any(name in one.metrics for one in members)]
    remembered = [part for part in ("allocator", "driver") if any(_bytes(one, part) for one in members)]
    columns = ["ms", "quartiles"] * timed + [_RATES[name][0] for name in rates]
    for name in (*columns, *(f"{part} MiB" for part in remembered)):
        table.add_column(name, justify="right")
    phased = any(one.phases for one in members)
    for name in (*["phases, ms"] * phased, "remark"):
        table.add_column(name, overflow="fold")
    bounded = any(one.ceilings for one in members)
    for one in members:
        cells = _time(one.time) if timed else []
        cells += [_rate(one.metrics.get(name), _RATES[name][1]) for name in rates]
        cells += [_mebibytes(_bytes(one, part)) for part in remembered]
        phases = ", ".join(f"{name} {_digits(1e3 * seconds)}" for name, seconds in one.phases.items())
        cells += [phases or DASH] * phased
        ceiling = bounded and not one.ceilings and one.status == OK
        style = "bold" if one.implementation.startswith("ours") else "dim" if ceiling else ""
        table.add_row(one.implementation, *cells, Text(_remark(one)), style=style)
    return table


def _time(time: Spread | None) -> list[str]:
    if time is None:
        return [DASH, DASH]
    return [_digits(time.median), f"{_digits(time.lower)}{DASH}{_digits(time.upper)}"]


def _rate(value: float | None, unit: float) -> str:
    return DASH if value is None else _digits(value / unit)


def _bytes(one: Measurement, part: str) -> int | None:
    return None if one.memory is None else getattr(one.memory, part)


def _mebibytes(count: int | None) -> str:
    return DASH if count is None else f"{count / 2**20:,.0f}"


def _remark(one: Measurement) -> str:
    state = "" if one.status == OK else one.status
    parts = [f"{state} {one.reason}".strip()]
    parts += [_metric(name, one.metrics) for name in one.metrics if name not in _RATES]
    parts += [f"{_words(name)} {value:.1e}" for name, value in one.accuracy.items()]
    return "; ".join(filter(None, parts))


def _metric(name: str, metrics: dict[str, float]) -> str:
    """A value; of an exponent with its interval, whose bounds are no metrics of their own to a reader."""
    if name.endswith(("_exponent_lower", "_exponent_upper")):
        return ""
    interval = ""
    if f"{name}_lower" in metrics:
        interval = f" ({metrics[f'{name}_lower']:.2f} to {metrics[f'{name}_upper']:.2f})"
    return f"{_words(name)} {_value(metrics[name])}{interval}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
