from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from grpo_fast.cli import main
from grpo_fast.plan.model_shape import model_config, with_layers
from grpo_fast.plan.report import Cell, render_table
from grpo_fast.plan.search import Context
from grpo_fast.plan.sizes import StepSizes

SIZES = ["--prompt-length", "64", "--max-completion-length", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration file without weights: SmolLM2's widths in two layers."""
    folder = tmp_path_factory.mktemp("model")
    with_layers(model_config("SmolLM2-135M"), 2).save_pretrained(folder)
    return str(folder / "config.json")


@pytest.fixture
def plan(model: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`plan("--gpu", "H200")`: of the model, the exit code and what is printed."""

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["plan", *([] if "--table" in arguments else ["--model", model, *SIZES]), *arguments])
        return code, capsys.readouterr().out

    return run


def test_a_plan_for_a_gpu_one_does_not_have(plan: Any) -> None:
    command = ["--gpu", "RTX-4090", "--micro-batch-tokens", "1024", "rollout.tools=[tools.py:add]"]

    code, printed = plan(*command, "memory.offload=[gradients,master]", "distributed.mode=shard")

    assert code == 0
    assert re.search(r"gradients +[\d.]+ MiB +away\n", printed)
    assert re.search(r"master +away +away\n", printed)
    assert re.search(r"num_generations +64 +the plan\n.*micro_batch_tokens +1024 +hand", printed)
    told = " ".join(printed.split())
    assert "seconds of a step, estimated" in told and "fits, " in told and "4,096 or more, then " in told
    assert "longest with this group: 2,048 tokens, the model's positions; the memory holds " in told
    assert "turns: max_completion_length" in told and "evicted" in told and "under torchrun alone" in told
    assert "memory.offload=[gradients," in plan(*command, "memory.offload=none")[1]  # not taken for markup


def test_a_plan_that_does_not_fit_is_a_failure_with_remedies(plan: Any) -> None:
    code, printed = plan("--gpu", "1100MiB")

    assert code == 1
    assert "does not fit" in printed and "gradient_checkpointing=" not in printed
    assert "the cheapest change with which it fits: model.train_lm_head=false\n" in printed


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
    assert code == 0 and found["fits"] and found["cheapest_change"] == {}
    assert found["estimated_seconds"] is None  # 24GiB may be of any GPU
    assert found["by_hand"] == ["rollout.num_generations", "model.gradient_checkpointing"]
    assert (found["values"]["memory.offload"], found["step"]["generations"]) == ([], 4)
    assert sum(found["parts"]["update"].values()) == found["total"]["update"]
    assert found["trainable_parameters"] == sum(found["parameters"].values()) > found["active_parameters"]
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 3 * 64
    context = found["largest_context"]
    assert context["tokens"] > context["positions"] and " in the " in context["bound"]
    assert {"change", "saves", "cost"} == set(found["knobs"][0])


def test_several_gpus_are_planned_in_both_modes_and_show_how_a_step_scales(plan: Any) -> None:
    command = ["--gpu", "RTX-4090", "--num-generations", "4", "--gpus"]

    code, printed = plan(*command, "2")

    assert code == 0
    assert "replicate update  replicate rollout  shard update  shard rollout" in printed
    assert "of these between ranks" in printed and "each of 2 ranks" in printed
    assert "replicate is chosen: a completion takes shard " in printed
    code, printed = plan(*command, "2", "1")
    rows = re.findall(r"^(\d) .* (\d+)% +(\S*)$", printed, re.MULTILINE)
    assert [(gpus, mode) for gpus, _, mode in rows] == [("1", ""), ("2", "replicate")]
    assert int(rows[0][1]) == 100 > int(rows[1][1])


def test_the_table_has_a_row_for_every_training_of_a_model(model: str, plan: Any) -> None:
    code, printed = plan("--table", model, "--gpu", "2GiB", "rollout.max_completion_length=64", "--json")

    found = json.loads(printed)
    cells = [Cell(**cell | {"context": Context(**cell["context"])}) for cell in found["what_fits"]]
    assert code == 0 and [cell.training for cell in cells] == ["full", "LoRA", "QLoRA"]
    assert cells[0].group < cells[1].group and {cell.bytes for cell in cells} == {2 << 30}
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render_table(cells, StepSizes(**found["step"])))
    for cell in cells:
        text = f" {cell.training} +{cell.group:,}\\+? · {cell.context.tokens // 1000} K\n"
        assert re.search(text, capture.get())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "SmolLM2-135M", "--gpu", "H999", *SIZES], "'H999'"),
        (["--model", "SmolLM2-135M", "--gpu", "H200"], "--prompt-length"),
        (["--gpu", "H200"], "--model"),
        (["--model", "SmolLM2-135M", "--gpu", "H200", "--gpus", "17", *SIZES], "17 ranks"),
        (["--table", "--gpus", "8"], "goes without"),
        (["--model", "./nowhere", "--gpu", "H200", *SIZES], "'./nowhere'"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", *arguments])

    assert code != 0
    assert message in capsys.readouterr().err
