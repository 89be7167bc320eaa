"""A trained model goes to the hub: what is checked at the start, what is pushed, and what a failure costs."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError

import grpo_fast
from grpo_fast.config import TrainConfig
from grpo_fast.run import train
from grpo_fast.run_record.config import HubConfig
from grpo_fast.run_record.hub import PushToHub


def refusal(status: int) -> HfHubHTTPError:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"status {status}", response=cast("Any", response))


ADA = {"name": "ada", "orgs": [{"name": "lovelace"}], "auth": {"accessToken": {"role": "write"}}}


class Hub:
    """`HfApi` at its border; `user` is what the hub says of the token, or raises."""

    user: Any = ADA
    failure: Exception | None = None

    def __init__(self, token: str | None, library_name: str) -> None:
        self.token = token

    def whoami(self) -> dict[str, Any]:
        if isinstance(self.user, Exception):
            raise self.user
        return self.user

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        pushed.append((name, private, exist_ok))

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> SimpleNamespace:
        if self.failure:
            raise self.failure
        pushed.append({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")


pushed: list[Any] = []


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    pushed.clear()
    mine = type("Mine", (Hub,), {})
    monkeypatch.setattr(huggingface_hub, "HfApi", mine)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return mine


@pytest.fixture
def config(toy: dict[str, Any], tmp_path: Path) -> TrainConfig:
    hub = {"push": "ada/near-w7", "private": False}
    return TrainConfig(**{**toy, "max_steps": 2, "output_dir": str(tmp_path / "run"), "hub": hub})


def test_a_finished_run_is_pushed_with_a_card_of_what_was_measured(config: TrainConfig, capsys):
    train(config, display=False)

    made, files = pushed
    card = files["README.md"].decode()
    assert made == ("ada/near-w7", False, True)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    evaluations = (Path(config.output_dir) / "evaluations.jsonl").read_text().splitlines()
    before, after = (100 * json.loads(line)["score"] for line in (evaluations[0], evaluations[-1]))
    assert f"{before:.1f} %" in card and f"→ {after:.1f} %" in card and "(10 questions" in card
    assert "library_name: transformers" in card and "base_model" not in card  # a folder is none of the hub's
    assert "learning_rate: 0.003" in card
    assert "pushed: https://huggingface.co/ada/near-w7/commit/1" in capsys.readouterr().out


def test_a_push_that_fails_loses_nothing_and_says_how_to_push_later(config: TrainConfig, hub, capsys):
    hub.failure = ConnectionError("no route")

    train(config, display=False)

    said = capsys.readouterr().out
    assert "not pushed to ada/near-w7 (ConnectionError: no route)" in said
    assert f"grpo-fast export {config.output_dir} exported && hf upload ada/near-w7 exported" in said
    assert grpo_fast.Run(config.output_dir).policy.generate(["w2"])


def test_a_run_that_a_signal_stops_is_not_pushed(config: TrainConfig, monkeypatch, capsys):
    monkeypatch.setattr(
        PushToHub, "on_step_end", lambda self, step, metrics: signal.raise_signal(signal.SIGTERM)
    )

    train(config, display=False)

    assert not pushed and "SIGTERM: not pushed to ada/near-w7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (refusal(401), "the hub refuses the token"),
        ({**ADA, "auth": {"accessToken": {"role": "read"}}}, "token of ada may only read"),
        ({**ADA, "name": "bob"}, "that of bob, who may write to bob, lovelace"),
    ],
)
def test_a_token_that_cannot_push_is_refused_at_the_start(hub, user: Any, message: str):
    hub.user = user
    with pytest.raises(ValueError, match=rf"hub.push = 'ada/near-w7'.*{message}"):
        PushToHub(HubConfig(push="ada/near-w7"))


def test_without_a_token_or_offline_the_start_says_what_to_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match=r"needs a token.*HF_TOKEN"):
        PushToHub(HubConfig(push="lovelace/model"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        PushToHub(HubConfig(push="lovelace/model"))


@pytest.mark.parametrize("answer", [refusal(503), ConnectionError("no network")])
def test_a_hub_that_does_not_answer_is_told_of_and_tried_at_the_end(hub, caplog, answer: Exception):
    hub.user = answer
    PushToHub(HubConfig(push="ada/near-w7"))
    assert "the push is tried at the end" in caplog.text


@pytest.mark.parametrize("name", ["near-w7", "ada/near w7", "ada/b/c", "ada/--x", ""])
def test_what_is_no_repository_is_a_wrong_configuration(name: str):
    with pytest.raises(ValueError, match="push"):
        HubConfig(push=name)
