"""What the README shows must be what the repository holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_fast.summary import score_text

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "grpo_fast" / "integrations" / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_of_the_readme_is_the_file_that_the_tests_run(example: Path):
    source = example.read_text(encoding="utf-8").strip()
    assert len(source.splitlines()) <= 30
    assert source in README


def test_the_quickstart_figures_of_the_readme_are_the_recorded_ones():
    record = json.loads((ROOT / "benchmarks" / "results" / "quickstart_cpu.json").read_text())
    assert len(record["runs"]) == 3
    for run in record["runs"]:
        before, after = run["before"], run["after"]
        row = f"| {run['seed']} | {score_text(before['score'], before['interval'])} | "
        assert row + score_text(after["score"], after["interval"]) in README
