"""Paths that a user writes: expanded, and absolute in a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_fast.cli import main
from grpo_fast.config.load import load_config
from grpo_fast.config.lookup import load_object
from grpo_fast.config.paths import user_path, with_absolute_paths
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.tree import value_at


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_a_home_and_variables_are_expanded_and_unknown_ones_refused(home: Path, tmp_path: Path):
    for written in ("~/a", "$HOME/a", "${HOME}/a", home / "a", "home/a"):
        assert user_path(written) == home / "a"
    (tmp_path / "cost$5.csv").touch()
    assert user_path("cost$5.csv") == tmp_path / "cost$5.csv"
    for wrong, says in {"$w7_gone/a": "export w7_gone", "~w7/a": "nobody's home", "": "is no path"}.items():
        with pytest.raises(ValueError, match=f"^output_dir = .*: .*{says}"):
            user_path(wrong, "output_dir")
    smallest = ["model.path=m", "dataset.source=d.jsonl", "rewards=[{reward: length}]"]
    with pytest.raises(ValueError, match=r"^the settings: .*\n  output_dir = '\$w7_gone/a': the environ"):
        load_config(None, [*smallest, "output_dir=$w7_gone/a"])


def test_a_runs_paths_become_absolute_and_names_stay(home: Path, tmp_path: Path):
    for file in ("m", "d.jsonl", "t.jinja", "near.py"):
        (tmp_path / file).touch()
    rewards = [{"reward": "r.py:f", "options": {"file": "r.py"}}, {"reward": "mine:f"}]
    stages = [{"name": "a", "overrides": {"dataset": {"source": "d.jsonl"}, "rewards": rewards}}]
    config = TrainConfig(
        model={"path": "m", "chat_template": "t.jinja"},
        dataset={"source": "~/gone.jsonl", "transform": "near:f"},
        evaluation={"dataset": {"source": "hub/id", "transform": "t.py:f"}},
        rewards=rewards,
        rollout={"tools": ["~/t.py:f"], "environment": {"a": "e.py:E", "b": "p.e:E"}},
        callbacks=["c.py", "p.c:C", "near:C"],
        advantage={"function": "a.py:f"},
        loss={"loss_type": "l.py:f", "beta": 0.1},
        reference={"path": "m"},
        stages=stages,
        output_dir="runs/../x",
    )
    found = with_absolute_paths(config)
    here = str(tmp_path)
    tree = found.model_dump()
    expected = {
        **{
            "reference.path": f"{here}/m",
            "model.path": f"{here}/m",
            "model.chat_template": f"{here}/t.jinja",
        },
        **{"dataset.source": f"{home}/gone.jsonl", "evaluation.dataset.source": "hub/id"},
        **{"dataset.transform": f"{here}/near.py:f", "evaluation.dataset.transform": f"{here}/t.py:f"},
        **{"rewards.0.reward": f"{here}/r.py:f", "rewards.0.options": {"file": "r.py"}},
        **{"rewards.1.reward": "mine:f", "rollout.tools": [f"{home}/t.py:f"]},
        **{"rollout.environment": {"a": f"{here}/e.py:E", "b": "p.e:E"}},
        **{"callbacks": [f"{here}/c.py", "p.c:C", f"{here}/near.py:C"], "output_dir": f"{here}/runs/../x"},
        **{"advantage.function": f"{here}/a.py:f", "loss.loss_type": f"{here}/l.py:f"},
        **{"stages.0.overrides.dataset.source": f"{here}/d.jsonl"},
        **{"stages.0.overrides.rewards.0.reward": f"{here}/r.py:f"},
    }
    assert {place: value_at(tree, place) for place in expected} == expected
    assert "seed" not in found.dataset.model_fields_set and with_absolute_paths(found) == found


def test_code_imports_the_files_beside_it_and_modules_of_the_working_folder(tmp_path: Path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "w7_helper.py").write_text(f"name = {folder!r}\n")
        (tmp_path / folder / "w7_late.py").write_text("name = 'late'\n")
        code = "from w7_helper import name\ndef late():\n    import w7_late\n    return w7_late.name\n"
        (tmp_path / folder / "code.py").write_text(code)
    (tmp_path / "w7_mine.py").write_text("name = 'mine'\n")
    assert [load_object(f"{folder}/code.py:name", "rewards") for folder in "ab"] == ["a", "b"]
    assert load_object("a/code.py:late", "rewards")() == "late"
    assert load_object("w7_mine:name", "rewards") == "mine"


def test_a_module_that_exits_is_an_error_that_names_it(tmp_path: Path, capsys):
    (tmp_path / "w7_exit.py").write_text("import sys\nsys.exit(0)\n")
    for name in ("w7_exit", "w7_exit.py"):
        with pytest.raises(ValueError, match=r"rewards = 'w7_exit.*SystemExit: 0, at .*w7_exit.py:2"):
            load_object(f"{name}:f", "rewards")
    (tmp_path / "w7_made.py").write_text(
        "class Made:\n    def __init__(self):\n        raise SystemExit(0)\n"
    )
    command = ["preview", "quickstart", "rewards=[{reward: 'w7_made:Made'}]"]
    assert main(command) == 1
    assert "sys.exit(0) was called, at" in capsys.readouterr().err


def test_the_options_of_commands_are_paths_too(home: Path, capsys):
    (home / "a.yaml").write_text("model_name_or_path: a/b\nlearning_rate: 1e-6\n")
    assert main(["convert", "~/a.yaml", "-o", "$HOME/b.yaml"]) == 3
    assert "learning_rate" in (home / "b.yaml").read_text()
    assert main(["report", "~/gone"]) == 1
    assert f"{home}/gone holds no run" in capsys.readouterr().err
