"""README tables come from records, and cannot drift from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.measure import Memory, Spread
from benchmarks.readme import render
from benchmarks.record import Measurement, Record, write_json
from benchmarks.tables import DASH

ENVIRONMENT = {
    "benchmark_device": "a machine",
    "device": "1 x a machine",
    "versions": {"torch": "2.13.0"},
    "started": "2026-11-20T09:00:00+00:00",
    "command": ["python", "-m", "benchmarks", "step", "--minutes", "2"],
}
SMALL, LARGE = {"tokens": 64, "dtype": "float32"}, {"tokens": 128, "dtype": "float32"}
OURS = Measurement(
    "ours", SMALL, time=Spread(4.0, 3.9, 4.1, 9), memory=Memory(3 << 20, None), accuracy={"logprob": 2e-6}
)


def table_of(folder: Path, *cells: Measurement, kind: str = "step") -> str:
    path = folder / "record.json"
    write_json(path, Record(kind, list(cells), ENVIRONMENT))
    return render(path)


def test_a_record_becomes_implementations_down_and_shapes_across(tmp_path):
    fast = Measurement("fast", SMALL, time=Spread(2.0, 1.9, 2.1, 9), accuracy={"logprob": 0.5})
    greedy = replace(fast, shape=LARGE, status="oom", time=None, accuracy={})
    absent = Measurement("absent", SMALL, status="skipped", reason="not installed")

    table = table_of(
        tmp_path, OURS, fast, replace(OURS, shape=LARGE, time=Spread(123.4, 120, 130, 9)), greedy, absent
    )

    assert table.splitlines() == [
        "| implementation | N 64, ms | N 128, ms | worst \\|Δlogp\\| | most extra MiB |",
        "|---|---:|---:|---:|---:|",
        f"| fast | 2.00 **wrong** | OOM | 5.0e-01 | {DASH} |",
        "| **ours** | 4.00 | 123 | 2.0e-06 | 3 |",
        "",
        "Not measured: absent (not installed).",
        "",
        "float32 · a machine · torch 2.13.0 · 2026-11-20 · "
        "repeat: `python -m benchmarks step --minutes 2` · [record](benchmarks/results/record.json)",
    ]


def test_the_product_is_the_first_row_where_it_was_measured(tmp_path):
    table = table_of(tmp_path, replace(OURS, ceilings={"product_seconds": 0.0015}), kind="head")

    assert table.splitlines()[2] == f"| *one product X Wᵀ* | 1.50 | {DASH} | {DASH} |"


def test_the_group_that_fits_is_shown_instead_of_its_time(tmp_path):
    found = replace(OURS, metrics={"largest_group": 96.0})

    assert "| **ours** | 96 |" in table_of(tmp_path, found, kind="group")


def test_the_side_by_side_shows_the_worst_of_all_losses_for_each_precision(tmp_path):
    def cell(precision: str, loss: float, kl: float) -> dict:
        exact = {"differences": {"loss": 0, "grad_norm": 0, "kl": 0}, "steps_compared": 20}
        ours = {"differences": {"loss": loss, "grad_norm": 1e-6, "kl": kl}, "steps_compared": 20}
        return {"precision": precision, "steps": 20, "variants": {"TRL": exact, "patched": ours}}

    cells = [cell("float32", 3e-7, 5e-7), cell("float32", 1e-7, 9e-7), cell("bfloat16", 2e-3, 1e-3)]
    path = tmp_path / "trl.json"
    path.write_text(json.dumps({"model": "random", "environment": ENVIRONMENT, "cells": cells}))

    lines = render(path).splitlines()

    assert lines[2] == "| patched | float32 | 2 | 40 of 40 | 3.0e-07 | 1.0e-06 | 9.0e-07 |"
    assert lines[3] == "| patched | bfloat16 | 1 | 20 of 20 | 2.0e-03 | 1.0e-06 | 1.0e-03 |"


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    """With one table, whose record is beside it."""
    write_json(tmp_path / "run.json", Record("step", [OURS], ENVIRONMENT))
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table: run -->\nnumbers by hand\n<!-- end -->\nafter\n")
    return page


def test_tables_are_written_between_their_markers_and_nothing_else_changes(readme, capsys):
    arguments = ["readme", f"--file={readme}", f"--results={readme.parent}"]

    assert main([*arguments, "--check"]) == 1
    assert "-numbers by hand" in capsys.readouterr().out
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- table: run -->\n| implementation |")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "| **ours** | 4.00 |" in text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("<!-- table: other -->\n<!-- end -->\n", "there are run"),
        ("<!-- table: run -->\n", "has no `<!-- end -->`"),
        ("<!-- table: run -->\n<!-- table: run -->\n<!-- end -->\n", "another table before it"),
    ],
)
def test_a_marker_that_cannot_be_filled_is_named(readme, capsys, text, named):
    readme.write_text(text)

    assert main(["readme", f"--file={readme}", f"--results={readme.parent}"]) == 2
    assert named in capsys.readouterr().err


def test_a_page_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["readme", f"--file={tmp_path / 'NONE.md'}"]) == 2
    assert "NONE.md: run this in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"source": "a histogram"}', "[]", "no JSON"])
def test_a_file_without_a_table_is_named(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)

    with pytest.raises(ValueError, match=r"other\.json"):
        render(path)


def test_peers_suites_become_their_counts_and_reasons(tmp_path):
    path = tmp_path / "suites.json"
    origin = {"device": "CPU", "versions": {"torch": "2.13.0"}, "started": "2026-11-20T09:00:00"}
    suite = {"commit": "0123456789", "passed": 1019, "failed": 1, "skipped": 2}
    suite["reasons"] = {"deselected": {"large": 1148}, "skipped": {}}
    path.write_text(json.dumps({"environment": origin, "suites": {"cce": suite}}))

    lines = render(path).splitlines()

    assert lines[2] == "| cce | 01234567 | 1,019 | 1 | 2 | 1,148 large |"
    assert lines[-1].startswith("CPU · torch 2.13.0 · 2026-11-20 · repeat: `python -m benchmarks.peer_suites")


def test_training_with_a_tolerance_becomes_final_rewards(tmp_path):
    path = tmp_path / "training.json"
    origin = {
        "device": "CPU",
        "versions": {"torch": "2.13.0"},
        "started": "2026-11-20",
        "command": ["a", "b"],
    }
    summary = {"tolerance 1": {"mean": 0.72601, "deviation": 0.01, "low": 0.7, "high": 0.75}}
    record = {"environment": origin, "summary": summary, "vocabulary": 2048, "steps": 60}
    path.write_text(json.dumps(record))

    lines = render(path).splitlines()

    assert lines[2] == "| tolerance 1 | 0.726 | 0.700 | 0.750 |"
    assert lines[-1].startswith("a toy with 2,048 words, 60 steps · CPU") and "`a b`" in lines[-1]
