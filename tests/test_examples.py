"""The loop as a script learns on the toy."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from grpo_fast.data import Prompt, load_prompts
from grpo_fast.data.config import DatasetConfig
from grpo_fast.examples import train_from_python, train_grpo
from grpo_fast.policy import load_policy
from grpo_fast.policy.config import ModelConfig, OptimizerConfig
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

    assert "step 1 of 1, held-out score: 0.0 %" in capsys.readouterr().out
    assert (run.folder / "exported" / "model.safetensors").is_file()
