"""Trained weights out of a run: which folders are accepted, and what is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors import SafetensorError

from grpo_fast.config.load import load_config
from grpo_fast.run.export import export_run, locate
from grpo_fast.run.python import Run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "checkpoints" / "step-7").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(
        "model: {path: m}\ndataset: {source: d}\nrewards: [{reward: exact_match}]\n", encoding="utf-8"
    )
    return tmp_path / "run"


def test_a_run_and_its_checkpoints_are_found(run):
    assert locate(run) == (run, None)
    assert locate(run / "checkpoints" / "step-7") == (run, run / "checkpoints" / "step-7")
    with pytest.raises(FileNotFoundError, match="is neither a run's directory"):
        locate(run / "checkpoints")


def test_a_folder_or_a_run_that_will_not_do_is_refused(run, tmp_path):
    with pytest.raises(FileExistsError, match="not an empty folder"):
        export_run(run, tmp_path)
    with pytest.raises(OSError, match=r"config\.yaml"):  # before weights are read: there are none
        export_run(run, run / "config.yaml" / "out")
    (run / "checkpoints" / "step-7").rmdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        export_run(run, tmp_path / "out")


@pytest.mark.parametrize("made_before", [True, False])
def test_an_export_that_fails_leaves_nothing_in_the_way_of_the_next(run, tmp_path, monkeypatch, made_before):
    class Written:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "config.json").write_text("{}")
            if failing:
                raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("grpo_fast.run.export.trained_policy", lambda *_: (Written(), 7))
    out, failing = tmp_path / "out", True
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "of_a_killed_export").touch()
    if made_before:
        out.mkdir()
    with pytest.raises(OSError, match=f"cannot write {out}: .*No space left"):
        export_run(run, out)
    failing = False
    assert export_run(run, out) == out
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_code_of_a_models_repository_needs_the_users_own_word(run, tmp_path, monkeypatch):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("path: m}", "path: m, trust_remote_code: true}"))
    words = []
    load = lambda config, *_: words.append(config.model.trust_remote_code) or (Mock(), 1)  # noqa: E731
    monkeypatch.setattr("grpo_fast.run.export.trained_policy", load)
    export_run(run, tmp_path / "a")
    export_run(run, tmp_path / "b", trust_remote_code=True)
    words += [load_config(run).model.trust_remote_code, Run(run).config.model.trust_remote_code]
    words += [load_config(run, ["model.trust_remote_code=true"]).model.trust_remote_code]
    assert words == [False, True, False, False, True]
