"""Runs the quickstart over several seeds and records held-out score before → after, with times.

Runs in a record of before stay in it, but for those of the same seed, dtype and vector instructions. A CPU of
another kind can be pretended: `ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2`.

`python -m benchmarks.quickstart --seeds 0 1 2 --json benchmarks/results/quickstart_cpu.json`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_fast.config.load import load_config
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import EVALUATIONS_FILE, PROVENANCE_FILE, TIMINGS_FILE
from grpo_fast.record.summary import score_text

from .record import write_json


def run_recipe(recipe: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """One run in a process of its own, and what it recorded."""
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quickstart", description=__doc__)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="where to write the record; every finished run is in it")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    if args.json and args.json.exists():
        before = json.loads(args.json.read_text(encoding="utf-8"))
        if [before["recipe"], before["overrides"]] != [args.recipe, args.overrides]:
            parser.error(f"--json: {args.json} is a record of {before['recipe']} {before['overrides']}")
        runs = {(run["arithmetic"], run["seed"]): run for run in before["runs"]}
    for seed in args.seeds:
        run = run_recipe(args.recipe, seed, args.overrides)
        runs[run["arithmetic"], seed] = run
        scores = (run[part] for part in ("before", "after"))
        print(f"seed {seed}:", " → ".join(score_text(found["score"], found["interval"]) for found in scores))
        write_json(args.json, {"recipe": args.recipe, "overrides": args.overrides, "runs": [*runs.values()]})


if __name__ == "__main__":
    main()
