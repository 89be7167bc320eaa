"""Measure whole training steps, phase by phase, of our trainer and of TRL's.

Both start from the same random weights and prompts, train on what they sample, and use the same engine. They
take turns of a few steps, each turn in a process of its own, since vLLM's sleeping memory serves one engine
per process. The first step of each turn warms up and does not count. Learning is not compared: the
completions have the longest length, the reward counts digits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

from grpo_fast.config.policy import ModelConfig

from .contest import medians
from .measure import NO_TIME, OK, SKIPPED, Failure, Stopwatch, give_back_memory, in_a_process, preload
from .models import add_models, chosen_models, make_policy
from .peers import choose
from .record import Measurement
from .rollout import ENGINES
from .session import Shape, add_common_arguments, add_sizes, by_device, check_common, run_session, sizes_of
from .step import LOSS, TRL_LOSS, share_of_digits, trl_trainer

SIZES = {
    "prompts": (4, 2, "of a step"),
    "group": (16, 4, "completions a prompt"),
    "prompt": (512, 16, "tokens of a prompt"),
    "completion": (1024, 16, "tokens of a completion at most"),
    "micro_batch_tokens": (16_384, 512, "of a forward and backward"),
    "steps": (3, 3, "of a turn that count; --repeats: turns"),
}
GENERATE, REWARD, UPDATE, PREPARE = "generate", "reward", "update", "log-probabilities and padding"
_TRL_PHASES = {
    "_generate_single_turn": GENERATE,
    "_calculate_rewards": REWARD,
    "_generate_and_score_completions": PREPARE,
    "training_step": UPDATE,
}
CORRECTION = "token_truncate"  # of vLLM's completions: all of them are work for the backward
_LEARNING_RATE = 1e-6


Turn = list[tuple[float, dict[str, float], float]]
"""Of each step, the first one too: its seconds, those of its phases, mean tokens of its completions."""


def our_turn(
    folder: Path, shape: Shape, prompts: Sequence[str], steps: int, seed: int, device: torch.device
) -> Turn:
    """Train with our trainer, whose own clock has the phases."""
    from grpo_fast.config.schema import TrainConfig
    from grpo_fast.plan import resolve_auto
    from grpo_fast.run import build_trainer

    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    turn, watch = [], Stopwatch(device)
    with tempfile.TemporaryDirectory() as run_folder:
        correction = CORRECTION if shape["engine"] == "vllm" else None
        config = {
            "output_dir": f"{run_folder}/run",
            "seed": seed,
            "max_steps": steps,
            "prompts_per_step": shape["prompts"],
            "micro_batch_tokens": shape["micro_batch_tokens"],
            "model": {"path": str(folder), "dtype": shape["dtype"], "device": device.type},
            "dataset": {"source": str(folder / "prompts.jsonl"), "chat": False},
            "rewards": [{"reward": f"{share_of_digits.__module__}:{share_of_digits.__name__}"}],
            "rollout": {
                "engine": shape["engine"],
                "num_generations": shape["group"],
                "max_completion_length": shape["completion"],
            },
            "loss": replace(LOSS, sampler_correction=correction),
            "advantage": {"skip_flat_groups": False},
            "optimizer": {"learning_rate": _LEARNING_RATE},
        }
        trainer = build_trainer(resolve_auto(TrainConfig.model_validate(config)))
        with trainer.engine:
            for _ in range(steps):
                watch.start()
                result = trainer.train_step()
                seconds, _ = watch.stop()
                phases = {name.removeprefix("time/"): spent for name, spent in result.timings.items()
                          if name.startswith("time/") and name != "time/step"}  # fmt: skip
                turn.append((seconds, phases, result.metrics["completion/length_mean"]))
    return turn


def trl_turn(
    folder: Path, shape: Shape, prompts: Sequence[str], steps: int, seed: int, device: torch.device
) -> Turn:
    """Train with TRL's GRPOTrainer; callbacks time the steps, and the methods that do them the phases."""
    from transformers import TrainerCallback

    watch, samples, update = Stopwatch(device), [], ExitStack()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.start()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            update.enter_context(watch.phase(UPDATE))

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            update.close()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            samples.append(watch.stop())

    batch = shape["prompts"] * shape["group"]
    fitting = max(1, shape["micro_batch_tokens"] // (shape["prompt"] + shape["completion"]))
    at_once = max(n for n in range(1, batch + 1) if batch % n == 0 and n <= fitting)
    on_gpu, vllm = device.type == "cuda", shape["engine"] == "vllm"
    options = {
        **TRL_LOSS,
        "max_steps": steps,
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": batch // at_once,
        "num_generations": shape["group"],
        "max_completion_length": shape["completion"],
        "learning_rate": _LEARNING_RATE,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": shape["dtype"] == "bfloat16",
        "use_vllm": vllm,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": vllm and on_gpu,
        "vllm_importance_sampling_mode": CORRECTION,
        "use_cpu": not on_gpu,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as run_folder:
        trainer = trl_trainer(run_folder, folder, prompts=prompts, **options)
        trainer.add_callback(Clock())
        for name, phase in _TRL_PHASES.items():
            setattr(trainer, name, watch.phase(phase)(getattr(trainer, name)))
        trainer.train()
    logged = trainer.state.log_history
    lengths = [entry["completions/mean_length"] for entry in logged if "loss" in entry]
    return [(*sample, length) for sample, length in zip(samples, lengths, strict=True)]


TURNS: dict[str, Callable[..., Turn]] = {"ours": our_turn, "TRL": trl_turn}


def compare(
    model: ModelConfig, shape: Shape, names: Sequence[str], seed: int, deadline: float, rounds: int
) -> list[Measurement]:
    """Let the trainers take turns."""
    device, draw = torch.device(model.device), random.Random(seed)
    count = 16 * shape["prompts"]
    prompts = ["".join(draw.choices(ascii_lowercase, k=shape["prompt"])) for _ in range(count)]
    found: dict[str, tuple[Measurement, Turn]] = {}
    for name in names:
        found[name] = Measurement(name, shape, SKIPPED, NO_TIME), []
    with tempfile.TemporaryDirectory() as folder:
        make_policy(model, shape["layers"], seed).save_pretrained(folder)
        give_back_memory(device)
        for name in list(found) * rounds:
            cell, steps = found[name]
            if time.monotonic() >= deadline or cell.reason not in ("", NO_TIME):
                continue
            given = Path(folder), shape, prompts, 1 + shape["steps"], seed, device
            try:
                turn, taken = in_a_process(device, TURNS[name], *given)
            except Failure as failure:
                cell.status, cell.reason = failure.args
                continue
            cell.status, cell.reason = OK, ""
            cell.peak_bytes = max(taken, cell.peak_bytes or 0)
            steps += turn[1:]
    for cell, steps in found.values():
        if steps and cell.status == OK:
            seconds, phases, lengths = zip(*steps, strict=True)
            cell.seconds, cell.phases = list(seconds), medians(phases)
            cell.metrics = {"tokens": statistics.median(lengths) * shape["prompts"] * shape["group"]}
    return [cell for cell, _ in found.values()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=3)
    add_models(parser, ["Qwen2.5-1.5B"], ["toy"], cpu_layers=2)
    add_sizes(parser, SIZES)
    engine = by_device("vllm", "transformers")
    parser.add_argument("--engine", choices=ENGINES, default=engine, help="what generates (%(default)s)")


def main(options: argparse.Namespace) -> int:
    check_common(options)
    names = choose(list(TURNS), options.impl)
    preload("grpo_fast.run.build", __name__, *["trl.trainer.grpo_trainer"] * ("TRL" in names))
    if options.group < 2:
        raise ValueError(f"--group must be at least 2 to compare completions, got {options.group}")
    bouts = []
    for model, shape in chosen_models(options):
        shape |= {**sizes_of(options, SIZES), "engine": options.engine, "dtype": options.dtype}
        bouts.append((shape, partial(compare, model, shape, names, options.seed)))
    return run_session(options, bouts)
