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


def test_the_product_comes_first_and_the_group_that_fits_takes_the_place_of_its_time(tmp_path):
    found = replace(OURS, ceilings={"product_seconds": 0.0015}, metrics={"largest_group": 96.0})

    assert table_of(tmp_path, found).splitlines()[2:4] == [
        f"| *one product X Wᵀ* | 1.50 | {DASH} | {DASH} |",
        "| **ours** | 4.00 | 2.0e-06 | 3 |",
    ]
    assert "| **ours** | 96 |" in table_of(tmp_path, found, kind="group")


REWARDS = {"mean": 0.72601, "low": 0.7, "high": 0.75}
SUITE = {"commit": "0123456789", "passed": 1019, "failed": 1, "skipped": 2}
SUITE["reasons"] = {"deselected": {"large": 1148, "other": 2}, "skipped": {}}


def variant(loss: float, kl: float, steps: int = 20) -> dict:
    return {"differences": {"loss": loss, "grad_norm": 1e-6, "kl": kl}, "steps_compared": steps}


def cell(precision: str, patched: dict) -> dict:
    return {"precision": precision, "steps": 20, "variants": {"TRL": variant(0, 0), "patched": patched}}


@pytest.mark.parametrize(
    ("record", "rows", "origin"),
    [
        (
            {
                "model": "random",
                "cells": [
                    cell("float32", variant(3e-7, 5e-7)),
                    cell("float32", variant(1e-7, 9e-7, steps=10)),
                    cell("bfloat16", variant(float("nan"), 1e-3)),
                ],
            },
            [
                "| patched | float32 | 2 | 30 of 40 | 3.0e-07 | 1.0e-06 | 9.0e-07 |",
                "| patched | bfloat16 | 1 | 20 of 20 | nan | 1.0e-06 | 1.0e-03 |",
            ],
            "model random · a machine · torch 2.13.0 · 2026-11-20 · "
            "repeat: `python -m benchmarks step --minutes 2` · [record](benchmarks/results/record.json)",
        ),
        (
            {"suites": {"cce": SUITE}},
            ["| cce | 01234567 | 1,019 | 1 | 2 | 1,148 large; 2 other |"],
            "a machine · torch 2.13.0 · 2026-11-20 · repeat: `python -m benchmarks.peer_suites --source",
        ),
        (
            {"summary": {"tolerance 1": REWARDS}, "vocabulary": 2048, "steps": 60},
            ["| tolerance 1 | 0.726 | 0.700 | 0.750 |"],
            "a toy with 2,048 words, 60 steps · a machine · ",
        ),
    ],
    ids=["side by side", "peers' suites", "tolerance"],
)
def test_other_records_have_tables_of_their_own(tmp_path, record, rows, origin):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"environment": ENVIRONMENT} | record))

    lines = render(path).splitlines()

    assert lines[2:-2] == rows
    assert lines[-2] == "" and lines[-1].startswith(origin)


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
    assert main(["readme", f"--file={readme.parent / 'NONE.md'}"]) == 2
    assert "NONE.md" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"source": "a histogram"}', "[]", "no JSON"])
def test_a_file_without_a_table_is_named(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)

    with pytest.raises(ValueError, match=r"other\.json"):
        render(path)
