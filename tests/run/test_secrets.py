"""Secrets of a run: no file and no line has one, and a variable of the environment stands for one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_fast.cli import main

JUDGE = """
def judge(completions, api_key, url, max_new_tokens, headers, **columns):
    assert (api_key, url) == ("sk-1234", "https://me:pass99@host/v1?token=tok77"), (api_key, url)
    assert headers == {"x_token": "hdr55"} and max_new_tokens == 4
    return [float(len(completion)) for completion in completions]
"""
SECRETS = ("sk-1234", "pass99", "tok77", "hdr55", "other11")


@pytest.fixture
def judged(toy: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "judge.py").write_text(JUDGE)
    options = {"api_key": "sk-1234", "url": "https://me:pass99@host/v1?token=tok77"}
    options |= {"max_new_tokens": 4, "headers": {"x_token": "hdr55"}}
    reward = {"reward": f"{tmp_path / 'judge.py'}:judge", "options": options}
    config = {**toy, "rewards": [reward], "threads": 1, "evaluation": {}, "max_steps": 1}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_no_file_and_no_line_of_a_run_holds_a_secret(judged, tmp_path, monkeypatch, capfd):
    run, key = tmp_path / "run", "rewards.0.options.api_key"
    command = ["train", str(judged), f"output_dir={run}", f"{key}=sk-1234"]
    monkeypatch.setattr(sys, "argv", ["grpo-fast", *command])
    assert main(command) == main([*command, "max_steps=2", "--resume"]) == 0
    assert main(["train", str(run), "max_steps=3", "--resume"]) == 1
    said = "".join(capfd.readouterr())
    assert f"{key} = '***' is hidden in a run's folder: give it again" in said
    for wrong in ("rewards.0.options.token={a: [other11}", "evaluation.token=other11"):
        assert main(["train", str(judged), wrong]) == 2
    assert main(["train", str(judged), "--print-config"]) == 0
    said += "".join(capfd.readouterr())
    written = [path for path in run.rglob("*") if path.is_file()]
    assert {"config.yaml", "report.html", "provenance.jsonl"} <= {path.name for path in written}
    for secret in SECRETS:
        assert secret not in said, said
        assert not [path for path in written if secret.encode() in path.read_bytes()]
    assert yaml.safe_load((run / "config.yaml").read_text())["rewards"][0]["options"] == {
        "api_key": "***",
        "url": "https://me:***@host/v1?token=***",
        "max_new_tokens": 4,
        "headers": {"x_token": "***"},
    }


def test_a_variable_of_the_environment_stands_for_a_secret(judged, tmp_path, monkeypatch, capfd):
    config = yaml.safe_load(judged.read_text())
    options = config["rewards"][0]["options"]
    options |= {"api_key": "${JUDGE_KEY}", "url": "${JUDGE_URL}", "headers": {"x_token": "${JUDGE_TOKEN}"}}
    judged.write_text(yaml.safe_dump(config))
    run, key = tmp_path / "run", "rewards.0.options.api_key"
    assert main(["train", str(judged), f"output_dir={run}"]) == 1
    said = f"{key} = '${{JUDGE_KEY}}', and the environment has no JUDGE_KEY: export JUDGE_KEY"
    assert said in capfd.readouterr().err

    url = f"https://me:pass99@host/v1?token={SECRETS[2]}"
    for name, value in {"KEY": SECRETS[0], "URL": url, "TOKEN": SECRETS[3]}.items():
        monkeypatch.setenv(f"JUDGE_{name}", value)
    assert main(["train", str(judged), f"output_dir={run}"]) == 0
    assert main(["train", str(run), "max_steps=2", "--resume"]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["rewards"][0]["options"] == options
    assert not [path for path in run.rglob("*") if path.is_file() and b"sk-1234" in path.read_bytes()]
