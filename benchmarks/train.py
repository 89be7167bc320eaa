"""`python -m benchmarks train`: whole training steps, phase by phase, of our trainer and of TRL's.

Both start from the same random weights and prompts and train on what they sample, with the same engine. They
take turns, a few steps at a time; the first step of each turn warms up and does not count. Learning is not
compared here: the completions are of the longest length, the reward counts digits.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .contest import TOKENS, Contest, Entrant, Prepared, Sample
from .measure import Stopwatch
from .models import add_models, chosen_models, save_model, vocabulary_of
from .peers import choose_names
from .rollout import ENGINES
from .session import add_common_arguments, add_sizes, check_common, positive, run_session, sizes_of
from .trainers import LOSS, TRL_LOSS, in_phase, share_of_digits, trl_trainer

SIZES = {
    "prompts": (16, 2, "of a step"),
    "group": (16, 4, "completions a prompt"),
    "prompt": (96, 16, "tokens of a prompt"),
    "completion": (512, 16, "tokens of a completion at most"),
    "micro_batch_tokens": (16_384, 512, "of a forward and backward"),
}
GENERATE, REWARD, UPDATE, PREPARE = "generate", "reward", "update", "log-probabilities and padding"
_TRL_PHASES = {
    "_generate_single_turn": GENERATE,
    "_calculate_rewards": REWARD,
    "_generate_and_score_completions": PREPARE,
    "training_step": UPDATE,
}
_LEARNING_RATE = 1e-6

Steps = list[tuple[Sample, float]]
"""Of each training step: seconds with those of its phases, and the mean length of the completions."""


def our_steps(
    folder: Path, shape: dict[str, Any], prompts: Sequence[str], steps: int, seed: int, watch: Stopwatch
) -> Steps:
    """Steps of our trainer, with its own clock for the phases."""
    from grpo_fast.config import TrainConfig
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
                "model": {"path": str(folder), "dtype": shape["dtype"], "device": watch.device.type},
                "dataset": {"source": str(folder / "prompts.jsonl"), "chat": False},
                "rewards": [{"reward": f"{share_of_digits.__module__}:{share_of_digits.__name__}"}],
                "rollout": {
                    "engine": shape["engine"],
                    "num_generations": shape["group"],
                    "max_completion_length": shape["completion"],
                },
                "loss": LOSS,
                "advantage": {"skip_flat_groups": False},
                "optimizer": {"learning_rate": _LEARNING_RATE},
            }
        )
        trainer, found = build_grpo_trainer(config), []
        with trainer.engine:
            for _ in range(steps):
                watch.start()
                result = trainer.train_step()
                seconds, _ = watch.stop()
                phases = {name.removeprefix("time/"): spent for name, spent in result.timings.items()
                          if name.startswith("time/") and name != "time/step"}  # fmt: skip
                found.append(((seconds, phases), result.metrics["completion/length_mean"]))
    return found


def trl_steps(
    folder: Path, shape: dict[str, Any], prompts: Sequence[str], steps: int, seed: int, watch: Stopwatch
) -> Steps:
    """Steps of TRL's GRPOTrainer, told by its callbacks; phases by the methods that do them."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    times: list[Sample] = []

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
    on_gpu, vllm = watch.device.type == "cuda", shape["engine"] == "vllm"
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
        "use_cpu": not on_gpu,
        "seed": seed,
        "logging_steps": 1,
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
    return list(zip(times, lengths, strict=True))


STEPS: dict[str, Callable[..., Steps]] = {"ours": our_steps, "TRL": trl_steps}


def contest(shape: dict[str, Any], names: list[str], steps: int, seed: int, device: torch.device) -> Contest:
    """The trainers on one model, in turns of so many steps that count."""
    folder, draw = tempfile.TemporaryDirectory(), random.Random(seed)
    saved, words = Path(folder.name), vocabulary_of(shape["model"]) - 2
    prompts = []
    for _ in range(16 * shape["prompts"]):
        prompts.append(" ".join(f"w{draw.randrange(words)}" for _ in range(shape["prompt"])))

    def prepare(name: str) -> Prepared:
        lengths: list[float] = []

        def turn(watch: Stopwatch) -> list[Sample]:
            _, *counted = STEPS[name](saved, shape, prompts, 1 + steps, seed, watch)
            lengths.extend(length for _, length in counted)
            gc.collect()  # a trainer holds itself in cycles, and the next one needs its memory
            return [sample for sample, _ in counted]

        def metrics(seconds: float) -> dict[str, float]:
            tokens = statistics.median(lengths) * shape["prompts"] * shape["group"]
            return {TOKENS: tokens / seconds, "tokens": tokens}

        return Prepared(turn, metrics=metrics, times_itself=True)

    return Contest(
        shape,
        [Entrant(name, partial(prepare, name)) for name in names],
        device,
        share=lambda: save_model(saved, shape["model"], shape["layers"], shape["dtype"], seed),
        release=folder.cleanup,
        wall=True,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=3)
    add_models(parser, ["Qwen2.5-0.5B"], ["toy"], cpu_layers=2)
    add_sizes(parser, SIZES)
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="what generates (transformers)")
    parser.add_argument(
        "--steps", type=positive, default=3, help="steps of a turn that count (3); --repeats: turns"
    )


def main(options: argparse.Namespace) -> int:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = check_common(options)
    names = choose_names(list(STEPS), options.impl)
    if options.group < 2:
        raise ValueError(f"--group must be at least 2 to compare completions, got {options.group}")
    more = {"engine": options.engine, "dtype": options.dtype}
    contests = []
    for model in chosen_models(options):
        shape = {**model, **sizes_of(options, SIZES), **more}
        contests.append(contest(shape, names, options.steps, options.seed, device))
    return run_session(options, contests)
