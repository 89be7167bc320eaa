"""The first lines of a run: what is trained, on what, where, and what to expect."""

from __future__ import annotations

import re

import pytest

from grpo_fast.config.schema import TrainConfig
from grpo_fast.plan import device_budget
from grpo_fast.run import build_trainer
from grpo_fast.run.opening import expected, opening_lines


@pytest.fixture
def lines_of(toy, make_trainer):
    def lines_of(**sections):
        merged = {k: {**toy.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}
        trainer = make_trainer(**sections)
        lines = opening_lines(TrainConfig(**{**toy, **merged}), trainer)
        return dict(line.split(maxsplit=1) for line in lines)

    return lines_of


def test_a_run_begins_with_its_model_its_data_its_groups_and_its_place(toy, lines_of):
    held_out = {"dataset": {**toy["dataset"], "size": 4}, "every": 1}
    settings = {"checkpoint": {"every": 5}, "loss": {"sampler_correction": "token_truncate"}}
    lines = lines_of(evaluation=held_out, **settings, output_dir="runs/mine", threads=1)
    assert list(lines) == ["model", "data", "groups", "run"]
    assert "parameters, all trained; float32 on CPU, 1 thread" in lines["model"]
    assert "24 prompts of 32 rows (8 left out, in the held-out set); held out, " in lines["data"]
    assert "scored before, every step and after: " in lines["data"]
    assert lines["data"].endswith("prompts.jsonl: 4 prompts")
    assert lines["groups"].startswith("4 prompts a step, 6 completions of each, at most 8 tokens")
    assert "by TransformersEngine, corrected by token_truncate; rewards: near_w7" in lines["groups"]
    assert "runs/mine: 6 steps; a checkpoint every 5 steps and at the end" in lines["run"]


def test_adapters_stages_and_long_prompts_are_told(toy, lines_of):
    stages = [{"name": "easy", "steps": 3}, {"name": "hard"}]
    dataset = {"max_prompt_length": 2, "overlong_prompts": "truncate"}
    lines = lines_of(model={"lora": {"r": 2}}, stages=stages, dataset=dataset)
    assert "trained (LoRA, r = 2)" in lines["model"] and "all trained" not in lines["model"]
    assert "32 prompts of 32 rows (32 cut to max_prompt_length)" in lines["data"]
    assert "6 steps in the stages easy, hard" in lines["run"]


def test_settings_that_are_seldom_meant_are_told(lines_of):
    lines = lines_of(model={"lora": {"r": 64}, "dtype": "float16"})
    assert "model.lora.r = 64 is more than the model's width, 32" in lines["caution"]
    assert "model.dtype = float16 loses small gradients" in lines["caution"]


def test_preferences_have_no_rollout_to_tell_of(toy, tmp_path):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "w2", "chosen": "w3", "rejected": "w4"}\n' * 4)
    kept = {key: toy[key] for key in ("model", "micro_batch_tokens")}
    config = TrainConfig(**kept, algorithm="dpo", dataset={"source": str(rows)}, prompts_per_step=2)
    model, data, groups, _ = opening_lines(config, build_trainer(config))
    assert "16,288 parameters" in model and "4 prompts" in data and "2 comparisons a step" in groups


def test_on_a_gpu_the_plan_says_what_to_expect(make_trainer):
    trainer = make_trainer(model={"dtype": "bfloat16"})
    assert re.fullmatch(
        r".+ in the update and .+ in the rollout, of 140\.4 GiB", expected(trainer, device_budget("H200"))
    )
