"""Trained weights out of a run: which folders are accepted, and what is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_fast.run.export import export_run, locate


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "checkpoints" / "step-7").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(
        "model: {path: m}\ndataset: {source: d}\nrewards: [{reward: exact_match}]\n", encoding="utf-8"
    )
    return tmp_path / "run"


def test_a_run_stands_for_its_newest_checkpoint_and_a_checkpoint_leads_to_its_run(run):
    assert locate(run) == (run, None)
    assert locate(run / "checkpoints" / "step-7") == (run, run / "checkpoints" / "step-7")
    with pytest.raises(FileNotFoundError, match="is neither a run's directory"):
        locate(run / "checkpoints")


def test_an_occupied_folder_and_a_run_without_a_checkpoint_are_refused(run, tmp_path):
    with pytest.raises(FileExistsError, match="not an empty folder"):
        export_run(run, tmp_path)
    (run / "checkpoints" / "step-7").rmdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        export_run(run, tmp_path / "out")
