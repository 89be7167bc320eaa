"""`python -m benchmarks train`: whole training steps, phase by phase, of our trainer and of TRL's.

Both start from the same random weights and prompts and train on what they sample, with the same engine. They
take turns, a few steps at a time, each turn in a process of its own, since vLLM's sleeping memory serves one
engine per process; the first step of each turn warms up and does not count. Memory is that of the process and
its libraries, and stands beside what our plan predicts. Learning is not compared here: the completions are of
the longest length, the reward counts digits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

from grpo_fast.config.policy import ModelConfig

from .contest import TOKENS, Contest, Entrant, Prepared, Sample
from .measure import Memory, Stopwatch, give_back_memory, in_a_process, preload
from .models import add_models, chosen_models, make_letters, make_policy
from .peers import choose_names
from .rollout import ENGINES
from .session import ByDevice, add_common_arguments, add_sizes, check_common, positive, run_session, sizes_of
from .trainers import LOSS, TRL_LOSS, in_phase, share_of_digits, trl_trainer

SIZES = {
    "prompts": (4, 2, "of a step"),
    "group": (16, 4, "completions a prompt"),
    "prompt": (512, 16, "tokens of a prompt"),
    "completion": (1024, 16, "tokens of a completion at most"),
    "micro_batch_tokens": (16_384, 512, "of a forward and backward"),
}
GENERATE, REWARD, UPDATE, PREPARE = "generate", "reward", "update", "log-probabilities and padding"
_TRL_PHASES = {
    "_generate_single_turn": GENERATE,
    "_calculate_rewards": REWARD,
    "_generate_and_score_completions": PREPARE,
    "training_step": UPDATE,
}
CORRECTION = "token_truncate"  # of vLLM's completions: none is left out, and all are work for the backward
_LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Turn:
    """What a trainer's steps took, the first one too."""

    samples: list[Sample]
    lengths: list[float]  # mean tokens of the completions of each step
    planned: float | None = None  # bytes of the device, where there is a plan


def our_turn(
    folder: Path, shape: dict[str, Any], prompts: Sequence[str], steps: int, seed: int, device: torch.device
) -> Turn:
    """Steps of our trainer, with its own clock for the phases."""
    from grpo_fast.config.schema import TrainConfig
    from grpo_fast.plan import device_budget, resolve_auto, shape_of, step_total, with_values
    from grpo_fast.run.build import build_grpo_trainer

    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    with tempfile.TemporaryDirectory() as run_folder:
        config = TrainConfig.model_validate(
            {
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
                "loss": replace(LOSS, sampler_correction=CORRECTION if shape["engine"] == "vllm" else None),
                "advantage": {"skip_flat_groups": False},
                "optimizer": {"learning_rate": _LEARNING_RATE},
            }
        )
        config = resolve_auto(config)
        budget = device_budget("cpu") if device.type == "cpu" else device_budget()
        known = with_values(config, {"dataset.max_prompt_length": shape["prompt"]})
        planned = step_total(known, shape_of(config.model, device.type), budget)
        turn = Turn([], [], float(max(planned.values())))
        trainer, watch = build_grpo_trainer(config), Stopwatch(device, wall=True)
        with trainer.engine:
            for _ in range(steps):
                watch.start()
                result = trainer.train_step()
                seconds, _ = watch.stop()
                phases = {name.removeprefix("time/"): spent for name, spent in result.timings.items()
                          if name.startswith("time/") and name != "time/step"}  # fmt: skip
                turn.samples.append((seconds, phases))
                turn.lengths.append(result.metrics["completion/length_mean"])
    return turn


def trl_turn(
    folder: Path, shape: dict[str, Any], prompts: Sequence[str], steps: int, seed: int, device: torch.device
) -> Turn:
    """Steps of TRL's GRPOTrainer, told by its callbacks; phases by the methods that do them."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    watch, times = Stopwatch(device, wall=True), []

    class Clock(TrainerCallback):
        update = ExitStack()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.start()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.update.enter_context(watch.phase(UPDATE))

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.update.close()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(watch.stop())

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
        trainer = trl_trainer(
            GRPOTrainer, run_folder, folder, prompts=prompts, reward=share_of_digits, **options
        )
        trainer.add_callback(Clock())
        for name, phase in _TRL_PHASES.items():
            setattr(trainer, name, in_phase(getattr(trainer, name), watch, phase))
        trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    return Turn(times, lengths)


TURNS: dict[str, Callable[..., Turn]] = {"ours": our_turn, "TRL": trl_turn}


def contest(
    model: ModelConfig, shape: dict[str, Any], names: list[str], steps: int, seed: int, device: torch.device
) -> Contest:
    """The trainers on one model, in turns of so many steps that count."""
    folder, draw = tempfile.TemporaryDirectory(), random.Random(seed)
    saved, size = Path(folder.name), shape["prompt"]
    prompts = ["".join(draw.choices(ascii_lowercase, k=size)) for _ in range(16 * shape["prompts"])]

    def prepare(name: str) -> Prepared:
        turns: list[Turn] = []
        found: dict[str, Any] = {}

        def turn(_: Stopwatch) -> list[Sample]:
            given = saved, shape, prompts, 1 + steps, seed, device
            done, taken = in_a_process(device, TURNS[name], *given)
            turns.append(done)
            found["memory"] = Memory(None, max(taken, found["memory"].driver if found else 0))
            return done.samples[1:]

        def metrics(seconds: float) -> dict[str, float]:
            lengths = [length for done in turns for length in done.lengths[1:]]
            tokens = statistics.median(lengths) * shape["prompts"] * shape["group"]
            planned = {} if turns[0].planned is None else {"planned_bytes": turns[0].planned}
            return {TOKENS: tokens / seconds, "tokens": tokens, **planned}

        return Prepared(turn, metrics=metrics, found=found, times_itself=True)

    def share() -> None:
        make_policy(model, shape["layers"], seed, make_letters).save_pretrained(saved)
        give_back_memory(device)

    entrants = [Entrant(name, partial(prepare, name)) for name in names]
    return Contest(shape, entrants, device, share=share, release=folder.cleanup)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=3)
    add_models(parser, ["Qwen2.5-1.5B"], ["toy"], cpu_layers=2)
    add_sizes(parser, SIZES)
    engine = ByDevice("vllm", "transformers")
    parser.add_argument("--engine", choices=ENGINES, default=engine, help="what generates (%(default)s)")
    parser.add_argument(
        "--steps", type=positive, default=3, help="steps of a turn that count (3); --repeats: turns"
    )


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    names = choose_names(list(TURNS), options.impl)
    preload("grpo_fast.run.build", __name__, *["trl.trainer.grpo_trainer"] * ("TRL" in names))
    if options.group < 2:
        raise ValueError(f"--group must be at least 2 to compare completions, got {options.group}")
    more = {"engine": options.engine, "dtype": options.dtype}
    contests = []
    for model, shape in chosen_models(options):
        shape |= {**sizes_of(options, SIZES), **more}
        contests.append(contest(model, shape, names, options.steps, options.seed, device))
    return run_session(options, contests)
