from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from grpo_fast.cli import main
from grpo_fast.plan.model_shape import model_config, with_layers

SIZES = ["--prompt-length", "64", "--max-completion-length", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration file without weights: SmolLM2's widths in two layers."""
    folder = tmp_path_factory.mktemp("model")
    with_layers(model_config("SmolLM2-135M"), 2).save_pretrained(folder)
    return str(folder / "config.json")


def test_a_plan_for_a_gpu_one_does_not_have(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", model, "--gpu", "RTX-4090", *SIZES, "--micro-batch-tokens", "1024"]

    assert main([*command, "memory.offload=[gradients,master]"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"gradients +[\d.]+ MiB +away\n", printed) and re.search(
        r"master +away +away\n", printed
    )
    code = main([*command, "memory.offload=none"])

    printed = capsys.readouterr().out
    assert code == 0
    for text in (
        " parameters, ",
        "RTX-4090",
        "optimizer",
        "KV cache",
        "seconds of a step, estimated",
        "what makes room",
        "fits, ",
        "completions of each",
        "4,096 or more, then ",
        "longest with this group: 2,048 tokens, the model's positions; the memory holds ",
    ):
        assert text in printed
    assert re.search(r"num_generations +64 +the plan\n.*micro_batch_tokens +1024 +hand", printed)
    assert "memory.offload=[gradients," in printed  # not taken for markup
    assert "turns: " not in printed
    main([*command, "rollout.tools=[tools.py:add]"])
    told = " ".join(capsys.readouterr().out.split())
    assert "turns: max_completion_length bounds the tokens of all" in told and "evicted" in told


def test_a_plan_that_does_not_fit_is_a_failure_with_remedies(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", "--model", model, "--gpu", "1100MiB", *SIZES])

    printed = capsys.readouterr().out
    assert code == 1
    assert (
        "does not fit" in printed
        and "the cheapest change with which it fits: model.train_lm_head=false\n" in printed
    )
    assert "model.train_lm_head=false" in printed and "gradient_checkpointing=" not in printed


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
    assert code == 0
    assert found["fits"]
    assert found["estimated_seconds"] is None  # 24GiB may be of any GPU
    assert found["by_hand"] == ["rollout.num_generations", "model.gradient_checkpointing"]
    assert found["values"]["memory.offload"] == []
    assert found["step"]["generations"] == 4
    assert sum(found["parts"]["update"].values()) == found["total"]["update"]
    assert found["trainable_parameters"] == sum(found["parameters"].values())
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 3 * 64
    context = found["largest_context"]
    assert context["tokens"] > context["positions"] and " in the " in context["bound"]
    assert found["cheapest_change"] == {}
    assert {"change", "saves", "cost", "largest_num_generations"} == set(found["knobs"][0])


def test_several_gpus_are_planned_in_both_modes(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_fast.plan.borders.borders", lambda *_: ["by GPUs: 2 either"])
    command = ["plan", "--model", model, "--gpu", "RTX-4090", *SIZES, "--num-generations", "4", "--gpus"]

    assert main([*command, "2"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "each of 2 ranks",
        "replicate update  replicate rollout  shard update  shard rollout",
        "of these between ranks",
        "replicate is chosen: a completion takes shard ",
        "by GPUs: 2 either",
        "distributed.mode",
    ):
        assert text in printed
    assert main([*command, "2", "1"]) == 0
    rows = re.findall(r"^(\d) .* (\d+)% +(\S*)$", capsys.readouterr().out, re.MULTILINE)
    assert [(gpus, mode) for gpus, _, mode in rows] == [("1", ""), ("2", "replicate")]
    assert int(rows[0][1]) == 100 > int(rows[1][1])
    main([*command, "1", "distributed.mode=shard"])
    assert "read under torchrun alone" in capsys.readouterr().out


def test_the_table_has_a_row_for_every_training_of_a_model(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--table", model, "--gpu", "2GiB", "rollout.max_completion_length=64"]

    assert main(command) == 0
    rows = re.findall(r" (full|LoRA|QLoRA) +([\d,]+)\+? · (\d+) K\n", capsys.readouterr().out)
    assert main([*command, "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["what_fits"]
    assert [row[0] for row in rows] == [cell["training"] for cell in cells] == ["full", "LoRA", "QLoRA"]
    assert [int(row[1].replace(",", "")) for row in rows] == [cell["group"] for cell in cells]
    assert [int(row[2]) for row in rows] == [cell["context"]["tokens"] // 1000 for cell in cells]
    assert cells[0]["group"] < cells[1]["group"] and cells[0]["bytes"] == 2 << 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "SmolLM2-135M", "--gpu", "H999", *SIZES], "'H999'"),
        (["--model", "SmolLM2-135M", "--gpu", "H200"], "--prompt-length"),
        (["--gpu", "H200"], "--model"),
        (["--model", "SmolLM2-135M", "--gpu", "H200", "--gpus", "17", *SIZES], "17 ranks"),
        (["--table", "--gpus", "8"], "goes without"),
        (["--model", "./nowhere", "--gpu", "H200", *SIZES], "'./nowhere'"),
        (["--model", "SmolLM2-135M", "--gpu", "H200", "--calibrate", *SIZES], "--calibrate"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", *arguments])

    assert code != 0
    assert message in capsys.readouterr().err
