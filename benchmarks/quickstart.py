"""Run a recipe over several seeds and record its held-out score before and after, with times.

`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` emulates a CPU without AVX-512.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_fast.config.load import load_config
from grpo_fast.config.paths import user_path
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import EVALUATIONS_FILE, PROVENANCE_FILE, TIMINGS_FILE
from grpo_fast.record.summary import score_text

from .record import write_json


def run_recipe(recipe: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train in a process of its own, and return what the run recorded."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        given = [recipe, f"output_dir={run_dir}", f"seed={seed}", *overrides]
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "grpo_fast", "train", *given], check=True)
        wall = time.perf_counter() - start
        before, *_, after = (e for e in read_jsonl(run_dir / EVALUATIONS_FILE) if e["name"] == "held-out")
        timings = read_jsonl(run_dir / TIMINGS_FILE)
        origin = read_jsonl(run_dir / PROVENANCE_FILE)[0]
        del origin["command"]  # full of temporary paths; the record has recipe, seed and overrides
        dtype = load_config(run_dir).model.dtype
    return {
        "seed": seed,
        "arithmetic": f"{dtype}, {torch.backends.cpu.get_cpu_capability()}",
        "before": before,
        "after": after,
        "steps": timings[-1]["step"],
        "seconds_training": sum(line["time/step"] for line in timings),
        "seconds_wall": wall,  # loading, both evaluations, checkpoint and report included
        "peak_bytes": max(line["memory/peak_bytes"] for line in timings),
        "provenance": origin,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=user_path, help="where to write the record, after every run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")


def main(options: argparse.Namespace) -> int:
    runs = []
    for seed in options.seeds:
        runs.append(run_recipe(options.recipe, seed, options.overrides))
        scores = (runs[-1][part] for part in ("before", "after"))
        print(f"seed {seed}:", " → ".join(score_text(found["score"], found["interval"]) for found in scores))
        write_json(options.json, {"recipe": options.recipe, "overrides": options.overrides, "runs": runs})
    return 0
