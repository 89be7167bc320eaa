"""The push to the hub: what is checked at the start, what is uploaded, and what a failure costs."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest

from grpo_fast.config.record import HubConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.record.hub import PushToHub
from grpo_fast.run import train


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replace `HfApi`; `files` are those that were uploaded."""

    def upload(*, repo_id: str, folder_path: str) -> SimpleNamespace:
        hub.files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")

    hub = Mock(files=None, **{"upload_folder.side_effect": upload})
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda library_name: hub)
    return hub


@pytest.fixture
def config(toy: dict[str, Any], tmp_path: Path) -> TrainConfig:
    hub = {"push": "ada/near-w7", "private": False}
    return TrainConfig(**{**toy, "max_steps": 2, "output_dir": str(tmp_path / "run"), "hub": hub})


def test_a_finished_run_is_pushed_with_a_card_of_its_scores(config: TrainConfig, hub, capsys):
    train(config, display=False)

    card = hub.files["README.md"].decode()
    hub.create_repo.assert_called_once_with("ada/near-w7", private=False, exist_ok=True)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= hub.files.keys()
    evaluations = (Path(config.output_dir) / "evaluations.jsonl").read_text().splitlines()
    before, after = (100 * json.loads(line)["score"] for line in (evaluations[0], evaluations[-1]))
    assert f"{before:.1f} %" in card and f"→ {after:.1f} %" in card and "(10 questions" in card
    assert "library_name: transformers" in card
    assert "learning_rate: 0.003" in card
    assert "pushed: https://huggingface.co/ada/near-w7/commit/1" in capsys.readouterr().out


@pytest.mark.parametrize("cause", ["no network", "a signal"])
def test_a_run_that_is_not_pushed_says_how_to_push_it_later(config, hub, monkeypatch, capsys, cause: str):
    hub.upload_folder.side_effect = ConnectionError("no route")
    if cause == "a signal":
        monkeypatch.setattr(PushToHub, "on_step_end", lambda *_: signal.raise_signal(signal.SIGTERM))

    train(config, display=False)

    said, why = capsys.readouterr().out, "SIGTERM" if cause == "a signal" else "ConnectionError: no route"
    assert "not pushed to ada/near-w7" in said and why in said
    assert f"grpo-fast export {config.output_dir} exported && hf upload ada/near-w7 exported" in said
    assert hub.upload_folder.called == (cause == "no network")


def test_a_hub_that_refuses_the_repository_is_named_at_the_start(hub):
    hub.create_repo.side_effect = ConnectionError("403 Forbidden")
    with pytest.raises(ValueError, match=r"hub\.push = 'ada/near-w7': 403 Forbidden; set HF_TOKEN"):
        PushToHub(HubConfig(push="ada/near-w7"))
