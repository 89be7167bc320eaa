from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_fast.cli import main
from grpo_fast.plan import measure
from grpo_fast.plan.model_shape import model_config, with_layers

SIZES = ["--prompt-length", "64", "--max-completion-length", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration file without weights: SmolLM2's widths in four layers."""
    folder = tmp_path_factory.mktemp("model")
    with_layers(model_config("SmolLM2-135M"), 4).save_pretrained(folder)
    return str(folder / "config.json")


@pytest.fixture
def plan(model: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`plan("--gpu", "H200")`: of the model, the exit code and what is printed."""

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["plan", "--model", model, *SIZES, *arguments])
        return code, capsys.readouterr().out

    return run


def test_a_plan_for_a_gpu_one_does_not_have(plan: Any) -> None:
    command = ["--gpu", "RTX-4090", "--gpus", "2", "--micro-batch-tokens", "1024", "rollout.tools=[a.py:add]"]

    code, printed = plan(*command, "memory.offload=[gradients,master]")

    assert code == 0
    assert re.search(r"gradients +[\d.]+ MiB +-\n", printed)
    assert re.search(r"micro_batch_tokens +1024 +configuration\n.*checkpointing.* the planner", printed)
    text = " ".join(printed.split())
    assert "fits, " in text and "largest num_generations: 4,096 or more" in text
    assert "activations: counted" in text
    assert "all turns" in text and "each of 2 ranks" in text
    assert re.search(r"distributed.mode +replicate", printed)
    assert re.search(r"memory.offload +\[gradients, master\] +configuration", printed)  # not taken for markup


def test_a_plan_that_does_not_fit_is_a_failure_with_remedies(plan: Any) -> None:
    code, printed = plan("--gpu", "1000MiB")

    text = " ".join(printed.split())
    assert code == 1
    assert "does not fit 1000MiB" in text and "model.train_lm_head=false, " in text


def test_the_plan_of_a_configuration_as_json(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {model}, gradient_checkpointing: true}}\n"
        "dataset: {source: x.jsonl, max_prompt_length: 64}\nrewards: [{reward: length}]\n"
    )

    code = main(["plan", str(path), "--gpu", "24GiB", "--json", "rollout.num_generations=4"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["fits"] and found["measured"] is None
    assert found["by_hand"] == ["model.gradient_checkpointing"]
    assert (found["values"]["memory.offload"], found["step"]["generations"]) == ([], 4)
    assert sum(found["parts"]["update"].values()) == found["total"]["update"]
    assert found["parameters"] == found["trainable_parameters"] > 28_000_000
    assert found["largest_num_generations"] == 4096


def test_a_calibration_measures_this_device(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SIZES", replace(measure.SIZES, completion_length=128))
    code, printed = plan("--calibrate", "model.dtype=float32")

    assert code == 0 and re.search(r"activations: measured, \d+% of the counted", printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "SmolLM2-135M", "--gpu", "H999", *SIZES], "'H999'"),
        (["--model", "SmolLM2-135M", "--gpu", "H200"], "--prompt-length"),
        (["--gpu", "H200"], "--model"),
        (["--model", "SmolLM2-135M", "--gpu", "H200", "--gpus", "17", *SIZES], "17 ranks"),
        (["--model", "SmolLM2-135M", "--gpu", "H200", "--calibrate", *SIZES], "--calibrate"),
        (["--model", "./nowhere", "--gpu", "H200", *SIZES], "'./nowhere'"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", *arguments])

    assert code != 0
    assert message in capsys.readouterr().err
