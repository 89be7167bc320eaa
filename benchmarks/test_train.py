"""Whole training steps, phase by phase, of our trainer and of TRL's.

Both start from the same random weights and prompts and use the same engine. They take turns of a few steps,
each turn in a new process, since vLLM's sleeping memory allows one engine per process. The first step of each
turn is a warm-up and does not count. The reward counts digits.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from statistics import median
from string import ascii_lowercase

import pytest

from .conftest import DTYPE, ON_GPU
from .measure import elsewhere, give_back_memory, in_a_process, medians, preload, replay
from .models import ARCHITECTURES, config_of, make_policy
from .trainers import train_ours, train_with_trl
from .updates import share_of_digits

TRAINERS = {"ours": train_ours, "TRL": train_with_trl}
AXES = {
    "model": ["Qwen2.5-1.5B" if ON_GPU else "toy"],
    "dtype": [DTYPE],
    "engine": ["vllm" if ON_GPU else "transformers"],
    "turn": [1, 2, 3],
    "peer": TRAINERS,
}
ALLOWED = {"model": ARCHITECTURES}
SIZES = {  # on a GPU, on a CPU
    "layers": (0, 2),  # of the model at most; 0: all
    "prompts": (4, 2),  # of a step
    "group": (16, 4),  # completions a prompt
    "prompt": (512, 16),  # tokens of a prompt
    "completion": (1024, 16),  # tokens of a completion at most
    "micro_batch_tokens": (16_384, 512),  # of a forward and backward
    "steps": (3, 3),  # of a turn that count
}
CORRECTION = "token_truncate"  # of vLLM's completions: no token is left out of the backward


@pytest.fixture(scope="module")
def recipe(model, dtype, engine, device, sizes, seed):
    """Write a configuration with random weights and prompts; return its path and its overrides."""
    if sizes["group"] < 2:
        raise ValueError(f"--sizes group={sizes['group']}: must be at least 2 to compare completions")
    preload("grpo_fast.run.build", "trl.trainer.grpo_trainer", train_with_trl.__module__)
    draw, count = random.Random(seed), 16 * sizes["prompts"]
    with tempfile.TemporaryDirectory() as folder:
        make_policy(config_of(model, dtype, device), sizes.get("layers"), seed).save_pretrained(folder)
        give_back_memory(device)
        prompts = ["".join(draw.choices(ascii_lowercase, k=sizes["prompt"])) for _ in range(count)]
        rows = "".join(json.dumps({"prompt": text}) + "\n" for text in prompts)
        (Path(folder) / "prompts.jsonl").write_text(rows)
        given = {
            "output_dir": f"{folder}/run",
            "seed": seed,
            "max_steps": 1 + sizes["steps"],
            "prompts_per_step": sizes["prompts"],
            "micro_batch_tokens": sizes["micro_batch_tokens"],
            "model": f"{{path: {folder}, dtype: {dtype}, device: {device.type}}}",
            "dataset.source": f"{folder}/prompts.jsonl",
            "rewards": f"[{{reward: '{share_of_digits.__module__}:share_of_digits'}}]",
            "rollout.engine": engine,
            "rollout.num_generations": sizes["group"],
            "rollout.max_completion_length": sizes["completion"],
            **({"loss.sampler_correction": CORRECTION} if engine == "vllm" else {}),
        }
        steps = Path(__file__).with_name("steps.yaml")
        yield str(steps), [f"{name}={value}" for name, value in given.items()]


@pytest.mark.benchmark(timer=elsewhere)
def test_train(peer, turn, recipe, sizes, device, benchmark):
    completions = sizes["prompts"] * sizes["group"]
    fitting = max(1, sizes["micro_batch_tokens"] // (sizes["prompt"] + sizes["completion"]))
    rows = max(n for n in range(1, completions + 1) if completions % n == 0 and n <= fitting)
    found, taken = in_a_process(device, TRAINERS[peer], *recipe, rows)
    seconds, phases = zip(*found["steps"][1:], strict=True)
    replay(benchmark, seconds)
    tokens = completions * median(found["lengths"][1:])
    benchmark.extra_info |= {"phases": medians(phases), "peak_bytes": taken, "tokens": tokens}
