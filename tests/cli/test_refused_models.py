"""What contradicts the model is refused by every command that would use it, before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_fast.cli import main


@pytest.fixture
def run_with(toy: dict[str, Any], tmp_path: Path) -> Any:
    """Runs a command on the toy, whose model's config.json says something else; gives the exit code."""

    def run(command: str, changes: dict[str, Any], **sections: Any) -> int:
        folder = tmp_path / "model"
        shutil.copytree(toy["model"]["path"], folder)
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        model = {**toy["model"], "path": str(folder)}
        config = {**toy, "model": model, "output_dir": str(tmp_path / "run"), **sections}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        return main([command, str(tmp_path / "run.yaml")])

    return run


@pytest.mark.parametrize("command", ["train", "eval", "preview"])
def test_a_prompt_and_a_completion_beyond_the_positions(command: str, run_with: Any, tmp_path: Path, capsys):
    assert run_with(command, {"max_position_embeddings": 10}) == 1
    needed = 3 + 8 if command == "preview" else 4 + 8
    assert f"need {needed} positions, and the model has 10" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_fixed_completions_beyond_the_positions(run_with: Any, tmp_path: Path, capsys):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "w2 w3", "chosen": "w4 w5 w6", "rejected": "w7"}\n')
    no_sampling = {"rewards": [], "rollout": {}, "evaluation": {}, "algorithm": "dpo", "prompts_per_step": 1}

    dataset = {"source": str(tmp_path / "pairs.jsonl")}
    assert run_with("train", {"max_position_embeddings": 5}, dataset=dataset, **no_sampling) == 1
    assert "need 6 positions, and the model has 5" in capsys.readouterr().err
