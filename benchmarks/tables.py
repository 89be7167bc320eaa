"""What a person reads: one table a cell, what was skipped, and the goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .cell import PRODUCT, Cell, Result
from .failures import ERROR, OK, SKIPPED
from .goals import TIMES, verdicts
from .timing import Spread

MEBIBYTE = 2**20
NONE = DASH = "\N{EN DASH}"


def console() -> Console:
    """The terminal, or wide enough for every column where the output goes to a file."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=170)


def cell_table(cell: Cell) -> Table:
    """Fastest first; what could not be measured last. Skipped implementations are listed once, elsewhere."""
    table = Table(title=cell.setting.title, caption=f"{cell.rows}; {cell.input_sets} sets of inputs in turn")
    table.add_column("implementation", overflow="fold")
    for name in (
        "ms",
        "quartiles",
        f"{TIMES} X Wᵀ",
        "TFLOP/s¹",
        "extra MiB",
        "driver MiB",
        "|Δlogp|",
        "|Δloss|",
        "dX",
        "dW",
    ):
        table.add_column(name, justify="right")
    table.add_column("remark", overflow="fold")
    if cell.product is not None:
        flops = 2.0 * cell.setting.tokens * cell.setting.hidden * cell.setting.vocabulary
        table.add_row(PRODUCT, *_time(cell, cell.product, flops), *[NONE] * 6, "the ceiling", style="dim")
    for result in sorted(cell.results, key=_order):
        if result.state != SKIPPED:
            table.add_row(*_row(cell, result), style="bold" if result.name.startswith("ours") else "")
    return table


def print_cell(screen: Console, cell: Cell) -> None:
    screen.print(cell_table(cell))
    screen.print()


def print_skipped(screen: Console, cells: Iterable[Cell]) -> None:
    """Each implementation that was skipped anywhere, with its reason, once."""
    reasons = {(r.name, r.reason): None for cell in cells for r in cell.results if r.state == SKIPPED}
    for name, reason in reasons:
        screen.print(Text(f"skipped {name}: {reason}"))


def print_notes(screen: Console) -> None:
    screen.print(
        "¹ of a dense computation (a product forward, one more per gradient): leaving work out raises it. "
        "|Δlogp|: largest error in nats; |Δloss|: absolute; dX, dW: relative errors, all against float64 "
        "(float32 on GPUs without). Extra: peak beyond the inputs, results included.",
        style="dim",
    )


def print_goals(screen: Console, cells: Sequence[Cell]) -> None:
    screen.print("Goals of the design (N = 16,384, a model's rows or made to match its live tiles):")
    for verdict in verdicts(cells):
        style = "green" if verdict.met else "dim" if verdict.found is None else "red"
        screen.print(Text(f"  {verdict}", style=style))


def _order(result: Result) -> tuple[bool, float]:
    return result.time is None, 0.0 if result.time is None else result.time.median


def _row(cell: Cell, result: Result) -> list[str]:
    times = [NONE] * 4 if result.time is None else _time(cell, result.time, cell.setting.flops)
    memory, accuracy = result.memory, result.accuracy
    return [
        result.name,
        *times,
        _mebibytes(memory and memory.allocator),
        _mebibytes(memory and memory.driver),
        *(
            _error(accuracy and getattr(accuracy, name))
            for name in ("logprob", "loss", "hidden_gradient", "weight_gradient")
        ),
        _remark(result),
    ]


def _time(cell: Cell, time: Spread, flops: float) -> list[str]:
    multiple = NONE if cell.product is None else f"{time.median / cell.product.median:.2f}"
    rate = flops / time.median / 1e9
    quartiles = f"{_digits(time.lower)}{DASH}{_digits(time.upper)}"
    return [_digits(time.median), quartiles, multiple, f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"]


def _digits(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _mebibytes(count: int | None) -> str:
    return NONE if count is None else f"{count / MEBIBYTE:,.0f}"


def _error(value: float | None) -> str:
    return NONE if value is None else f"{value:.1e}"


def _remark(result: Result) -> str:
    parts = []
    if result.state != OK:
        parts.append(f"{result.state} {result.reason}".strip())
    if result.accuracy is not None and not result.accuracy.acceptable:
        parts.append("INACCURATE")
    elif result.accuracy is not None and result.accuracy.logprob is None and result.state != ERROR:
        parts.append("returns no log-probabilities")
    if result.certificate is not None:
        density, bound = result.certificate["density"], result.certificate["error_bound"]
        parts.append(f"density {density:.2%}, certified error {bound:.2f}")
    return "; ".join(parts)
