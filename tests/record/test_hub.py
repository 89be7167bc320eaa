"""A trained model goes to the hub: what is checked at the start, what is pushed, and what a failure costs."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError

import grpo_fast
from grpo_fast.config.record import HubConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.record.hub import PushToHub
from grpo_fast.run import train


def refusal(status: int) -> HfHubHTTPError:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"status {status}", response=cast("Any", response))


ADA = {"name": "ada", "orgs": [{"name": "lovelace"}], "auth": {"accessToken": {"role": "write"}}}


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """`HfApi` at its border; `files` are those that were pushed."""

    def upload(*, repo_id: str, folder_path: str, commit_message: str) -> SimpleNamespace:
        hub.files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")

    hub = Mock(token="hf_x", files=None, **{"whoami.return_value": ADA, "upload_folder.side_effect": upload})
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token, library_name: hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return hub


@pytest.fixture
def config(toy: dict[str, Any], tmp_path: Path) -> TrainConfig:
    hub = {"push": "ada/near-w7", "private": False}
    return TrainConfig(**{**toy, "max_steps": 2, "output_dir": str(tmp_path / "run"), "hub": hub})


def test_a_finished_run_is_pushed_with_a_card_of_what_was_measured(config: TrainConfig, hub, capsys):
    train(config, display=False)

    card = hub.files["README.md"].decode()
    hub.create_repo.assert_called_with("ada/near-w7", private=False, exist_ok=True)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= hub.files.keys()
    evaluations = (Path(config.output_dir) / "evaluations.jsonl").read_text().splitlines()
    before, after = (100 * json.loads(line)["score"] for line in (evaluations[0], evaluations[-1]))
    assert f"{before:.1f} %" in card and f"→ {after:.1f} %" in card and "(10 questions" in card
    assert "library_name: transformers" in card and "base_model" not in card  # a folder is none of the hub's
    assert "learning_rate: 0.003" in card
    assert "pushed: https://huggingface.co/ada/near-w7/commit/1" in capsys.readouterr().out


def test_a_push_that_fails_loses_nothing_and_says_how_to_push_later(config: TrainConfig, hub, capsys):
    hub.upload_folder.side_effect = ConnectionError("no route")

    train(config, display=False)

    said = capsys.readouterr().out
    assert "not pushed to ada/near-w7 (ConnectionError: no route)" in said
    assert f"grpo-fast export {config.output_dir} exported && hf upload ada/near-w7 exported" in said
    assert grpo_fast.Run(config.output_dir).policy.generate(["w2"])


def test_a_run_that_a_signal_stops_is_not_pushed(config: TrainConfig, hub, monkeypatch, capsys):
    monkeypatch.setattr(PushToHub, "on_step_end", lambda *_: signal.raise_signal(signal.SIGTERM))

    train(config, display=False)

    assert hub.files is None and "SIGTERM: not pushed to ada/near-w7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("user", "token", "offline", "message"),
    [
        (refusal(401), "hf_x", False, "the hub refuses the token"),
        ({**ADA, "auth": {"accessToken": {"role": "read"}}}, "hf_x", False, "token of ada may only read"),
        ({**ADA, "name": "bob"}, "hf_x", False, "that of bob, who may write to bob, lovelace"),
        (ADA, None, False, "needs a token.*HF_TOKEN"),
        (ADA, None, True, "HF_HUB_OFFLINE"),
    ],
)
def test_what_cannot_be_pushed_is_refused_at_the_start(hub, monkeypatch, user: Any, token, offline, message):
    hub.token, hub.whoami.side_effect = token, [user]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ValueError, match=rf"hub.push = 'ada/near-w7'.*{message}"):
        PushToHub(HubConfig(push="ada/near-w7"))


@pytest.mark.parametrize("answer", [refusal(503), ConnectionError("no network")])
def test_a_hub_that_does_not_answer_is_told_of_and_tried_at_the_end(hub, caplog, answer: Exception):
    hub.whoami.side_effect = answer
    PushToHub(HubConfig(push="lovelace/near-w7"))
    assert "the push is tried at the end" in caplog.text
