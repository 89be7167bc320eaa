"""The loop as a script learns on the toy."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch

from grpo_fast.data import Prompt, load_prompts
from grpo_fast.data.config import DatasetConfig
from grpo_fast.examples import train_grpo
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
