"""Held-out score of a recipe before and after training, over several seeds, with times.

`--peer ours,TRL` trains it with TRL's GRPOTrainer, too: each run in its own process, in turns, with the same
weights, prompts, rewards and settings. `--part` changes one setting at a time, so that the differences
between runs show where the time goes. `--set evaluation.every=5 --reach 0.4` shows the time to that score.

`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` emulates a CPU without AVX-512.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from grpo_fast.config.load import load_config
from grpo_fast.plan import resolve_auto
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import EVALUATIONS_FILE, TIMINGS_FILE

from .measure import ELSEWHERE, Unsupported, in_a_process, medians
from .trainers import train_with_trl

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
        dtype = load_config(run_dir).model.dtype
    seconds = [line["time/step"] for line in timings]
    return {
        "arithmetic": _arithmetic(dtype),
        "before": before,
        "after": after,
        "scores": [score | {"seconds": sum(seconds[: score["step"]])} for score in scores],
        "seconds": seconds,
        "phases": {name: median(line[f"time/{name}"] for line in timings) for name in ("generate", "reward")},
        "training": sum(seconds),
        "whole_command": wall,  # loading, both evaluations, checkpoint and report included
        "peak_bytes": max(line["memory/peak_bytes"] for line in timings),
    }


def run_with_trl(
    recipe: str, seed: int, overrides: Sequence[str], rows: int, our_head: bool
) -> dict[str, Any]:
    """Train with TRL in a process of its own, and return the same of it."""
    start, device = time.perf_counter(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = recipe, [f"seed={seed}", *overrides], rows, our_head
    found, _ = in_a_process(device, train_with_trl, *given)
    seconds, phases = zip(*found["steps"], strict=True)
    return {
        "arithmetic": _arithmetic(found["dtype"]),
        "before": found["scores"][0],
        "after": found["scores"][-1],
        "scores": found["scores"],
        "seconds": seconds,
        "phases": medians(phases),
        "training": sum(seconds),
        "whole_command": time.perf_counter() - start,
        "peak_bytes": found["peak_bytes"],
    }


def _arithmetic(dtype: str) -> str:
    return f"{dtype}, {torch.backends.cpu.get_cpu_capability()}"


def seconds_to(run: dict[str, Any], score: float) -> float | None:
    """Return the seconds of training before the first evaluation at a score; None where it is not reached."""
    reached = (one["seconds"] for one in run["scores"] if (one["score"] or 0) >= score)
    return next(reached, None)


AXES = {"seed": ["0", "1", "2"], "part": [AS_IT_IS], "peer": (OURS, TRL)}
ALLOWED = {"part": PARTS}
SIZES = {"rows": (32, 32)}  # completions of a micro-batch of TRL's


@pytest.mark.benchmark(timer=ELSEWHERE)
def test_recipe(peer, part, seed, sizes, pytestconfig, benchmark):
    trainers, changes = PARTS[part]
    if peer not in trainers:
        raise Unsupported(f"{part!r} is a setting of {' and '.join(trainers)} only")
    recipe, overrides = (pytestconfig.getoption(name) for name in ("recipe", "set"))
    config = resolve_auto(load_config(recipe, overrides))
    if config.evaluation.dataset is None:
        raise ValueError(f"{recipe} has no held-out questions: set evaluation.dataset.source")
    # The same dtype for all runs.
    given = recipe, int(seed), [*overrides, f"model.dtype={config.model.dtype}", *changes]
    run = run_recipe(*given) if peer == OURS else run_with_trl(*given, sizes["rows"], part == OUR_HEAD)
    ELSEWHERE.replay(benchmark, run.pop("seconds"))
    benchmark.extra_info |= run
    if (score := pytestconfig.getoption("reach")) is not None:
        seconds = seconds_to(run, score)
        reached = "not reached" if seconds is None else f"after {seconds:.3g} s"
        benchmark.extra_info["remark"] = f"{score:g} {reached}"
