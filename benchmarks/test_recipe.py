"""Held-out score of a recipe before and after training, over several seeds, with times.

Each run has its own process, and the same weights, prompts, rewards and settings for both trainers. `our
head` is TRL's trainer with our head. With `--set evaluation.every=5` the record has scores during training.
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

from .measure import elsewhere, in_a_process, medians, replay
from .trainers import last_of, train_with_trl

OURS, TRL, OUR_HEAD = IMPLEMENTATIONS = "ours", "TRL", "our head"
PHASES = ("generate", "reward", "logprobs", "update")
AXES = {"seed": ["0", "1", "2"], "peer": IMPLEMENTATIONS}
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
def test_recipe(peer, seed, sizes, device, pytestconfig, benchmark):
    recipe, overrides = pytestconfig.getoption("recipe") or "quickstart", pytestconfig.getoption("set")
    usual = resolve_auto(load_config(recipe, overrides))
    if usual.evaluation.dataset is None:
        raise ValueError(f"{recipe} has no held-out questions: set evaluation.dataset.source")
    # The same dtype for all runs.
    given = recipe, last_of([*overrides, f"model.dtype={usual.model.dtype}", f"seed={seed}"])
    start = time.perf_counter()
    if peer == OURS:
        run = run_ours(*given)
    else:
        run, _ = in_a_process(device, train_with_trl, *given, sizes["rows"], peer == OUR_HEAD)
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
