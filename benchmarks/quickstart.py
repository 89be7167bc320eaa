"""Run a recipe over several seeds and record its held-out score before and after, with times.

`--trainer ours TRL` trains it with TRL's GRPOTrainer too: each run in its own process, in turns, with the
same weights, prompts, rewards and settings. `--part` changes one setting at a time, so that the differences
between runs show where the time goes. `evaluation.every=5` gives the time that each trainer takes to reach a
score.

`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` emulates a CPU without AVX-512.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from grpo_fast.config.load import load_config
from grpo_fast.config.paths import user_path
from grpo_fast.plan import resolve_auto
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import EVALUATIONS_FILE, PROVENANCE_FILE, TIMINGS_FILE, provenance
from grpo_fast.record.summary import score_text

from .contest import medians
from .measure import in_a_process
from .record import write_json
from .session import by_device, positive
from .trl_recipe import train_with_trl

OURS, TRL = "ours", "TRL"
AS_IT_IS, OUR_HEAD = "as it is", "our head"
PARTS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    AS_IT_IS: ((OURS, TRL), ()),
    "float32": ((OURS, TRL), ("model.dtype=float32",)),
    "bfloat16": ((OURS, TRL), ("model.dtype=bfloat16",)),
    "head trained": ((OURS, TRL), ("model.train_lm_head=true",)),
    "head frozen": ((OURS, TRL), ("model.train_lm_head=false",)),
    "flat groups trained": ((OURS,), ("advantage.skip_flat_groups=false",)),
    "padded": ((OURS,), ("model.packing=none", "advantage.skip_flat_groups=false")),
    OUR_HEAD: ((TRL,), ()),
}
"""Who trains each part, and the overrides of the recipe. TRL never skips flat groups."""


def run_recipe(recipe: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train in a process of its own, and return what the run recorded."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        given = [recipe, f"output_dir={run_dir}", f"seed={seed}", *overrides]
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "grpo_fast", "train", *given], check=True)
        wall = time.perf_counter() - start
        scores = read_jsonl(run_dir / EVALUATIONS_FILE)
        before, *_, after = (e for e in scores if e["name"] == "held-out")
        timings = read_jsonl(run_dir / TIMINGS_FILE)
        origin = read_jsonl(run_dir / PROVENANCE_FILE)[0]
        del origin["command"]  # full of temporary paths; the record has recipe, seed and overrides
        dtype = load_config(run_dir).model.dtype
    seconds = [line["time/step"] for line in timings]
    return {
        "seed": seed,
        "arithmetic": _arithmetic(dtype),
        "before": before,
        "after": after,
        "scores": [score | {"seconds": sum(seconds[: score["step"]])} for score in scores],
        "steps": timings[-1]["step"],
        "seconds_of_a_step": median(seconds),
        "phases": {name: median(line[f"time/{name}"] for line in timings) for name in ("generate", "reward")},
        "seconds_training": sum(seconds),
        "seconds_wall": wall,  # loading, both evaluations, checkpoint and report included
        "peak_bytes": max(line["memory/peak_bytes"] for line in timings),
        "provenance": origin,
    }


def run_with_trl(
    recipe: str, seed: int, overrides: Sequence[str], *, rows: int, our_head: bool
) -> dict[str, Any]:
    """Train with TRL in a process of its own, and return the same of it."""
    start = time.perf_counter()
    given = recipe, [f"seed={seed}", *overrides], rows, our_head
    found, _ = in_a_process(torch.device(by_device("cuda", "cpu")), train_with_trl, *given)
    seconds, phases = zip(*found["steps"], strict=True)
    return {
        "seed": seed,
        "arithmetic": _arithmetic(found["dtype"]),
        "before": found["scores"][0],
        "after": found["scores"][-1],
        "scores": found["scores"],
        "steps": len(seconds),
        "seconds_of_a_step": median(seconds),
        "phases": medians(phases),
        "seconds_training": sum(seconds),
        "seconds_wall": time.perf_counter() - start,
        "peak_bytes": found["peak_bytes"],
        "provenance": provenance(),
    }


def _arithmetic(dtype: str) -> str:
    return f"{dtype}, {torch.backends.cpu.get_cpu_capability()}"


def seconds_to(run: dict[str, Any], score: float) -> float | None:
    """Return the seconds of training before the first evaluation at a score; None where it is not reached."""
    reached = (one["seconds"] for one in run["scores"] if (one["score"] or 0) >= score)
    return next(reached, None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trainer", nargs="+", choices=(OURS, TRL), default=[OURS])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=[AS_IT_IS])
    parser.add_argument(
        "--rows", type=positive, default=32, help="completions of a micro-batch of TRL's (32)"
    )
    parser.add_argument("--reach", type=float, help="print the time of training to this held-out score")
    parser.add_argument("--json", type=user_path, help="where to write the record, after every run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")


def main(options: argparse.Namespace) -> int:
    runs = []
    dtype = resolve_auto(load_config(options.recipe, options.overrides)).model.dtype  # the same for all runs
    turns = [
        (part, trainer) for part in options.part for trainer in options.trainer if trainer in PARTS[part][0]
    ]
    for seed, (part, trainer) in product(options.seeds, turns):
        given = options.recipe, seed, [*options.overrides, f"model.dtype={dtype}", *PARTS[part][1]]
        if trainer == OURS:
            run = run_recipe(*given)
        else:
            run = run_with_trl(*given, rows=options.rows, our_head=part == OUR_HEAD)
        runs.append(run | {"trainer": trainer, "part": part})
        scores = " → ".join(
            score_text(run[end]["score"], run[end]["interval"]) for end in ("before", "after")
        )
        spent = f"{run['seconds_of_a_step']:.3g} s a step, {run['peak_bytes'] / 2**30:.2f} GiB"
        print(f"seed {seed}, {trainer}, {part}: {scores}; {spent}")
        if options.reach is not None:
            seconds = seconds_to(run, options.reach)
            print(f"  {options.reach:g}", "not reached" if seconds is None else f"after {seconds:.3g} s")
        write_json(options.json, {"recipe": options.recipe, "overrides": options.overrides, "runs": runs})
    return 0
