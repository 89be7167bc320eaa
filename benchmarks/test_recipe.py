"""Held-out score of a recipe before and after training, over several seeds, with times.

`--peer ours,TRL` trains it with TRL's GRPOTrainer, too: each run in its own process, in turns, with the same
weights, prompts, rewards and settings. `--part` changes one setting at a time, so that the differences
between runs show where the time goes. With `--set evaluation.every=5` the record has the time of training to
each score.

`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` emulates a CPU without AVX-512.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.config.load import load_config
from grpo_fast.plan import resolve_auto
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import EVALUATIONS_FILE, TIMINGS_FILE

from .measure import Unsupported, elsewhere, in_a_process, medians, replay
from .trainers import train_with_trl

OURS, TRL = "ours", "TRL"
PHASES = ("generate", "reward", "logprobs", "update")
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


AXES = {"seed": ["0", "1", "2"], "part": [AS_IT_IS], "peer": (OURS, TRL)}
ALLOWED = {"part": PARTS}
SIZES = {"rows": (32, 32)}  # completions of a micro-batch of TRL's


def run_ours(recipe: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Train by the command line, and return what `train_with_trl` does."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        given = [recipe, f"output_dir={run_dir}", *overrides]
        subprocess.run([sys.executable, "-m", "grpo_fast", "train", *given], check=True)
        scores, timings = (read_jsonl(run_dir / name) for name in (EVALUATIONS_FILE, TIMINGS_FILE))
    steps = [(of["time/step"], {name: of[f"time/{name}"] for name in PHASES}) for of in timings]
    scores = [one | {"seconds": sum(spent for spent, _ in steps[: one["step"]])} for one in scores]
    return {"steps": steps, "scores": scores, "peak_bytes": max(of["memory/peak_bytes"] for of in timings)}


@pytest.mark.benchmark(timer=elsewhere)
def test_recipe(peer, part, seed, sizes, device, pytestconfig, benchmark):
    trainers, changes = PARTS[part]
    if peer not in trainers:
        raise Unsupported(f"{part!r} is a setting of {' and '.join(trainers)} only")
    recipe, overrides = pytestconfig.getoption("recipe") or "quickstart", pytestconfig.getoption("set")
    usual = resolve_auto(load_config(recipe, overrides))
    if usual.evaluation.dataset is None:
        raise ValueError(f"{recipe} has no held-out questions: set evaluation.dataset.source")
    # The same dtype for all runs.
    given = recipe, [*overrides, f"model.dtype={usual.model.dtype}", *changes, f"seed={seed}"]
    start = time.perf_counter()
    if peer == OURS:
        run = run_ours(*given)
    else:
        run, _ = in_a_process(device, train_with_trl, *given, sizes["rows"], part == OUR_HEAD)
    wall = time.perf_counter() - start  # of loading, evaluations, checkpoint and report, too
    seconds, phases = zip(*run["steps"], strict=True)
    whole = [one for one in run["scores"] if one["n"] == run["scores"][0]["n"]]
    capability = torch.backends.cpu.get_cpu_capability()
    about = {"recipe": recipe, "arithmetic": f"{load_config(*given).model.dtype}, {capability}"}
    about |= {"questions": whole[0]["n"], **({"set": " ".join(overrides)} if overrides else {})}
    replay(benchmark, seconds)
    benchmark.extra_info |= {
        "sizes": about,
        "before": whole[0],
        "after": whole[-1],
        "scores": run["scores"],
        "phases": medians(phases),
        "training": sum(seconds),
        "whole_command": wall,
        "peak_bytes": run["peak_bytes"],
    }
