"""What a session keeps, what its file reads back as, and the tables of README.md and docs/."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.problem import PRODUCT
from benchmarks.readme import filled
from benchmarks.record import Measurement, Record, read, write_json
from benchmarks.session import run_session
from benchmarks.tables import DASH, table

SMALL, LARGE = {"tokens": 64, "trainable": False}, {"tokens": 128, "trainable": False}


def session(path: Path, *measured: object, minutes: float = 1.0) -> tuple[int, Record]:
    """The exit code and the record of a session whose shapes give these cells, or raise."""

    def bout(found: object):
        def measure(deadline: float, rounds: int) -> list[Measurement]:
            if isinstance(found, BaseException):
                raise found
            return [found]

        return measure

    options = argparse.Namespace(
        kind="step", minutes=minutes, device="cpu", repeats=3, json=path / "out.json"
    )
    bouts = [({"number": i}, bout(found)) for i, found in enumerate(measured)]
    return run_session(options, bouts), read(options.json)


def test_what_ends_a_run_early_loses_nothing_that_was_measured(tmp_path):
    cell = Measurement("ours", SMALL, seconds=[0.5, float("nan")], metrics={"loss": float("inf")})

    code, record = session(tmp_path, cell, MemoryError(), KeyboardInterrupt(), cell)

    assert (code, record.stopped) == (130, "interrupted")
    assert [(one.implementation, one.status) for one in record.cells] == [("ours", "ok"), ("all", "oom")]
    assert repr(record.cells[0]) == repr(cell)  # as text, where NaN equals itself
    assert record.not_measured == [{"number": 2}, {"number": 3}]


OURS = Measurement("ours", SMALL, seconds=[0.004, 0.002], peak_bytes=3 << 20, metrics={"tokens": 30.0})
GREEDY = Measurement("greedy", LARGE, "oom", accuracy={"logprob": float("nan")})
CELLS = [
    OURS,
    Measurement(PRODUCT, SMALL, seconds=[0.0015]),
    GREEDY,
    Measurement("absent", SMALL, "skipped", "not installed"),
]


def test_a_table_has_the_fastest_first_and_only_columns_with_content():
    title, heads, rows = table(CELLS)

    assert title == "frozen head"
    assert heads[:4] == ["implementation", "tokens", "ms", "quartiles"] and "dX" not in heads
    found = [dict(zip(heads, row, strict=True)) for row in rows]
    assert [one["implementation"] for one in found] == [PRODUCT, "ours", "greedy"]
    assert (found[1]["ms"], found[1]["\N{MULTIPLICATION SIGN} X Wᵀ"], found[1]["MiB"]) == (
        "3.00",
        "2.00",
        "3",
    )
    assert (found[1]["tokens"], found[1]["tokens/s"]) == ("N 64", "10,000")
    assert (found[2]["remark"], found[2]["ms"], found[2]["|Δlogp|"]) == ("out of memory", DASH, "nan")
    assert table([]) == ("", [], [])


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """With one table, whose record is beside it."""
    about = {"device": "a machine", "versions": {"torch": "2.13.0"}, "started": "2026-11-20T09:00:00"}
    command = ["python", "-m", "benchmarks", "step"]
    write_json(tmp_path / "run.json", Record("step", about | {"command": command}, cells=CELLS))
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table: run -->\nnumbers by hand\n<!-- end -->\nafter\n")
    return page


def test_tables_are_written_between_their_markers_and_nothing_else_changes(page):
    text = filled(page, page.parent)

    assert text.startswith("before\n<!-- table: run -->\n| implementation | tokens | ms |")
    assert "\n| greedy | N 128 | \N{EN DASH} |" in text and "\\|Δlogp\\|" in text
    repeat = "frozen head · a machine · torch 2.13.0 · 2026-11-20 · repeat: `python -m benchmarks step`"
    assert text.endswith(f"\n\n{repeat} · [record](run.json)\n<!-- end -->\nafter\n")


@pytest.mark.parametrize(
    ("text", "record", "named"),
    [
        ("<!-- table: other -->\n<!-- end -->\n", "{}", "other.json cannot be read"),
        ("<!-- table: run -->\n", "{}", "has no `<!-- end -->`"),
        ("<!-- table: run -->\n<!-- end -->\n", '{"source": "a histogram"}', "run.json is of no kind"),
    ],
)
def test_what_cannot_be_filled_is_named(page, text, record, named):
    (page.parent / "run.json").write_text(record)
    page.write_text(text)

    with pytest.raises(ValueError, match=named):
        filled(page, page.parent)
