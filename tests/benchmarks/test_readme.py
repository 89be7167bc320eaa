"""README tables come from records, and cannot drift from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.measure import Memory, Spread
from benchmarks.problem import PRODUCT
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


def test_a_record_becomes_implementations_down_and_shapes_across(tmp_path):
    fast = Measurement("fast", SMALL, time=Spread(2.0, 1.9, 2.1, 9), accuracy={"logprob": 0.5})
    greedy = replace(fast, shape=LARGE, status="oom", time=None, accuracy={"logprob": float("nan")})
    absent = Measurement("absent", SMALL, status="skipped", reason="not installed")
    large = replace(OURS, shape=LARGE, time=Spread(123.4, 120, 130, 9))
    product = Measurement(PRODUCT, SMALL, time=Spread(1.5, 1.4, 1.6, 9))
    path = tmp_path / "record.json"
    write_json(path, Record("step", [product, OURS, fast, large, greedy, absent], ENVIRONMENT))

    assert render(path, "the link").splitlines() == [
        "| implementation | N 64, ms | N 128, ms | worst \\|Δlogp\\| | most extra MiB |",
        "|---|---:|---:|---:|---:|",
        f"| *one product X Wᵀ* | 1.50 | {DASH} | {DASH} | {DASH} |",
        f"| fast | 2.00 **wrong** | out of memory | nan | {DASH} |",
        "| **ours** | 4.00 | 123 | 2.0e-06 | 3 |",
        "",
        "Not measured: absent (not installed).",
        "",
        "float32 · a machine · torch 2.13.0 · 2026-11-20 · "
        "repeat: `python -m benchmarks step --minutes 2` · [record](the link)",
    ]


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    """With one table, whose record is beside it."""
    write_json(tmp_path / "run.json", Record("step", [OURS], ENVIRONMENT))
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table: run -->\nnumbers by hand\n<!-- end -->\nafter\n")
    return page


def test_tables_are_written_between_their_markers_and_nothing_else_changes(readme, capsys):
    arguments = ["readme", f"--files={readme}", f"--results={readme.parent}"]

    assert main([*arguments, "--check"]) == 1
    assert "-numbers by hand" in capsys.readouterr().out
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- table: run -->\n| implementation |")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "| **ours** | 4.00 |" in text


@pytest.mark.parametrize(
    ("page", "record", "named"),
    [
        ("<!-- table: other -->\n<!-- end -->\n", "{}", "there are run"),
        ("<!-- table: run -->\n", "{}", "has no `<!-- end -->`"),
        ("<!-- table: run -->\n<!-- table: run -->\n<!-- end -->\n", "{}", "another table before it"),
        ("<!-- table: run -->\n<!-- end -->\n", '{"source": "a histogram"}', "run.json is of no kind"),
        ("<!-- table: run -->\n<!-- end -->\n", "no JSON", "run.json cannot be read"),
        (None, "{}", "README.md: run this in a checkout"),
    ],
)
def test_what_cannot_be_filled_is_named(readme, capsys, page, record, named):
    (readme.parent / "run.json").write_text(record)
    readme.unlink()
    if page is not None:
        readme.write_text(page)

    assert main(["readme", f"--files={readme}", f"--results={readme.parent}"]) == 2
    assert named in capsys.readouterr().err
