"""What the README shows must be what the repository holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "grpo_fast" / "integrations" / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_of_the_readme_is_the_file_that_the_tests_run(example: Path):
    source = example.read_text(encoding="utf-8").strip()
    assert len(source.splitlines()) <= 30
    assert source in README


def test_its_tables_are_those_of_the_checked_in_records(capsys):
    assert "<!-- table: quickstart_cpu -->" in README
    code = main(["readme", "--check"])

    assert code == 0, capsys.readouterr().out + "write them with `python -m benchmarks readme`"
