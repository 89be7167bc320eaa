"""What the README shows must be what the repository holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from grpo_fast.config_io import load_config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOT_SHOWN = {"__init__.py", "train_grpo.py", "train_from_python.py"}
EXAMPLES = [path for path in sorted((ROOT / "grpo_fast/examples").glob("*.py")) if path.name not in NOT_SHOWN]
assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_of_the_readme_is_the_file_that_the_tests_run(example: Path):
    source = example.read_text(encoding="utf-8").strip()
    assert len(source.splitlines()) <= 30
    assert source in README


def test_the_heads_example_runs_as_it_stands(capsys):
    section = README.partition("## The head alone")[2]
    code = section.partition("```python\n")[2].partition("```")[0]

    exec(compile(code, "README.md", "exec"), {})

    assert "Certificate(density=" in capsys.readouterr().out


def test_its_configuration_is_one_that_train_takes(tmp_path):
    section = README.partition("## Train")[2]
    path = tmp_path / "run.yaml"
    path.write_text(section.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")

    config = load_config(path)

    assert config.dataset.max_prompt_length, "`grpo-fast plan` needs it"


def test_its_tables_are_those_of_the_checked_in_records(capsys):
    assert "<!-- table: quickstart_cpu -->" in README
    code = main(["readme", "--check"])

    assert code == 0, capsys.readouterr().out + "write them with `python -m benchmarks readme`"


def test_every_file_that_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|md|toml))`", text))

    assert len(named) > 20
    assert [
        path for path in named if not ((ROOT / path).is_file() or (ROOT / "grpo_fast" / path).is_file())
    ] == []
