from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_fast.cli import main

TOPICS = ("w2 w3 w4", "w9 w10 w11", "w17 w18 w19")


@pytest.fixture
def config_file(toy: dict[str, Any], tmp_path: Path):
    rows = [{"prompt": f"{TOPICS[i % 3]} w{20 + i % 4}"} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def write(**sections: Any) -> str:
        path = tmp_path / "run.yaml"
        dataset = {"source": str(tmp_path / "rows.jsonl")}
        path.write_text(yaml.safe_dump({**toy, "dataset": dataset, **sections}))
        return str(path)

    return write


def test_describe_shows_sizes_likeness_and_examples(config_file, capsys):
    groups = {"strategy": "similarity", "similarity_threshold": 0.3}

    assert main(["groups", "describe", config_file(groups=groups), "--examples", "1"]) == 0

    out = capsys.readouterr().out
    assert "12 prompts" in out and "strategy similarity" in out
    assert "3 groups; 100.0 % of the prompts are in company" in out and "3 of size 4" in out
    assert "in steps of 4 prompts 100.0 % share a baseline, 4.00 prompts on average" in out
    assert out.count("group of 4 prompts, 24 completions, mean similarity") == 1
    shown = [line for line in out.splitlines() if line.startswith("  | ")]
    assert len(shown) == 4 and len({line[:12] for line in shown}) == 1


def test_the_default_strategy_says_that_nothing_is_shared(config_file, capsys):
    assert main(["groups", "describe", config_file()]) == 0
    assert (
        "each prompt's 6 completions are compared with each other and with no others"
        in capsys.readouterr().out
    )


def test_stages_that_group_in_their_own_way_are_shown_each(config_file, capsys):
    stages = [
        {"name": "first", "steps": 2},
        {"name": "second", "steps": 2, "overrides": {"groups": {"strategy": "similarity"}}},
        {"name": "third", "overrides": {"loss": {"beta": 0.1}, "groups": {"strategy": "similarity"}}},
    ]
    assert main(["groups", "describe", config_file(stages=stages)]) == 0
    out = capsys.readouterr().out
    assert "stage first:" in out and "stage second:" in out and "stage third:" not in out


def test_a_strategy_that_does_not_fit_fails_with_one_sentence(config_file, capsys):
    assert main(["groups", "describe", config_file(), "groups.strategy=prefix"]) == 1
    assert "use another strategy" in capsys.readouterr().err
