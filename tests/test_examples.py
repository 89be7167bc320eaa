"""The loop as a script learns on the toy."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors import safe_open

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.policy import ModelConfig, OptimizerConfig
from grpo_fast.data import Prompt, load_prompts
from grpo_fast.examples import count_shapes, train_from_python, train_grpo
from grpo_fast.policy import load_policy
from grpo_fast.rollout import Completion


def near_w7(prompt: Prompt, completion: Completion) -> float:
    numbers = [int(word[1:]) for word in completion.text.split()]
    return fmean(1 / (1 + abs(number - 7)) for number in numbers) if numbers else 0.0


def test_the_loop_as_a_script_raises_the_held_out_score(toy: dict[str, Any], capsys) -> None:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    torch.manual_seed(seed)
    policy = load_policy(ModelConfig(**toy["model"]))
    held_out = load_prompts(DatasetConfig(**toy["evaluation"]["dataset"]), policy.tokenizer)
    prompts = load_prompts(DatasetConfig(**toy["dataset"]), policy.tokenizer)

    before, after = train_grpo.train(
        policy,
        prompts,
        held_out,
        reward=near_w7,
        right=near_w7,
        steps=15,
        optimizer_config=OptimizerConfig(learning_rate=5e-3),
        max_tokens=8,
    )

    assert after > before + 0.1
    assert "step 15: reward" in capsys.readouterr().out


def test_training_from_python_gives_the_run_back_and_exports_it(toy: dict[str, Any], tmp_path: Path, capsys):
    few = {"model": toy["model"], "max_steps": 1, "prompts_per_step": 4, "logging.tensorboard": False}
    rows = {"dataset": train_from_python.sums(8, seed=2), "evaluation": train_from_python.sums(4, seed=3)}

    run = train_from_python.main(**few | rows, display=False, output_dir=tmp_path / "run")

    assert re.search(r"step 1 of 1, held-out score, .*: 0\.0 %", capsys.readouterr().out)
    assert (run.folder / "exported" / "model.safetensors").is_file()


def test_a_random_model_trains_on_pictures_and_is_written_whole(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = {"dataset": count_shapes.pictures(16, seed=2), "evaluation": count_shapes.pictures(8, seed=3)}
    few |= {"max_steps": 2, "prompts_per_step": 8, "logging.tensorboard": False, "display": False}
    few["rewards"] = first_is_even

    run = count_shapes.main("shapes", **few)

    assert "step 2 of 2, held-out score, " in capsys.readouterr().out
    run.policy.save_pretrained(tmp_path / "exported")
    assert run.metrics["groups/flat"].mean() < 1
    assert (tmp_path / "exported" / "preprocessor_config.json").is_file()
    assert any(key.startswith("visual") or ".visual." in key for key in tensors(tmp_path / "exported"))


def first_is_even(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def tensors(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return [*file.keys()]
