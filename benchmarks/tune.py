"""`python -m benchmarks.tune`: regenerate the table of sizes for the GPU at hand.

One change of the shipped sizes at a time, stage by stage; a change is kept when it gives the right result and
is faster by more than noise, measured in turns with the incumbent. Candidates are compiled ahead in processes
of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo_fast.head import tuning
from grpo_fast.head.call import Wanted
from grpo_fast.head.operator import device_facts
from grpo_fast.head.tuning import Rule, Sizes, Table

from . import aot
from .contest import Contest, Entrant, Prepared
from .dry_head import BatchSizes, step
from .kernels import Head
from .live_tiles import HISTOGRAM, load_histogram
from .machine import environment
from .measure import Unsupported
from .problem import FORWARD_BACKWARD, Setting
from .record import write_json
from .rows import make_problem

TOKENS = 16_384
WORST_GRADIENT = 8e-3  # relative to the dense one; rounding of both and the tolerance cost half of it
LEAST_GAIN = 0.01
ROUNDS = 12

FORWARD, PAIRS, WEIGHT, ROWS = "forward", "pairs", "dW", "dX"
CANDIDATES: dict[str, tuple[dict[str, Any], ...]] = {
    FORWARD: ({"group": 8}, {"group": 32}, {"stages": 3}, {"stages": 5, "depth": 32}),
    ROWS: ({"row_stages": 3}, {"row_stages": 6}, {"row_width": 512}, {"row_width": 2048},
           {"row_entries": 2}),
    PAIRS: ({"pair_rows": 64}, {"pair_programs": 1, "pair_registers": None}, {"pair_stages": 2},
            {"pair_stages": 4}),
    WEIGHT: ({"weight_warps": 4}, {"weight_depth": 128}, {"weight_stages": 4}, {"weight_columns": 256},
             {"weight_columns": 64}),
}  # fmt: skip
"""Stage by stage, the changes that are tried on what is best so far."""


@dataclass(frozen=True)
class ShapeClass:
    """A class of shapes, and the one that stands for it."""

    hidden_up_to: int | None
    hidden: int
    vocabulary: int
    trainable: bool


SHAPES = tuple(
    ShapeClass(up_to, hidden, vocabulary, trainable)
    for trainable in (True, False)
    for up_to, hidden, vocabulary in ((3072, 2048, 151_936), (None, 4096, 128_256), (1024, 896, 151_936))
)


def changed(sizes: Sizes, stage: str, change: dict[str, Any]) -> Sizes:
    """The sizes with one change; the wide tile's for the forward, the sparse backward's elsewhere."""
    if stage == FORWARD:
        return replace(sizes, wide=replace(sizes.wide, **change))
    return replace(sizes, sparse=replace(sizes.sparse, **change))


def candidates(sizes: Sizes, architecture: str) -> Iterator[tuple[str, dict[str, Any], Sizes]]:
    """Stage, change and result, of what this architecture can be asked for."""
    for stage, changes in CANDIDATES.items():
        if stage == FORWARD and sizes.wide is None:
            continue
        for change in changes:
            tried = changed(sizes, stage, change)
            with planned_with(tried):
                planned = BatchSizes().plan(architecture).forward_tile  # another one where this does not fit
            if stage != FORWARD or planned == tried.wide:
                yield stage, change, tried


def planned_with(sizes: Sizes) -> AbstractContextManager[object]:
    """Every plan made inside takes these sizes."""
    return mock.patch("grpo_fast.head.plan.sizes_for", lambda *_: sizes)


# Compilation ---------------------------------------------------------------------------------------------


def compile_one(architecture: str, shape: ShapeClass, sizes: Sizes, exact: bool = False) -> list[str]:
    """Compiles what a forward and backward launch, into Triton's cache; what is wrong with it.

    Runs in a process of its own: Triton's driver is replaced by one without a GPU.
    """
    batch = BatchSizes(rows=TOKENS, depth=shape.hidden, vocabulary=shape.vocabulary)
    launch = partial(step, batch, architecture, weight=shape.trainable, exact=exact)
    try:
        with planned_with(sizes):
            found = aot.reports(architecture, {"": launch})
    except Exception as error:  # the compiler's own errors have no common base
        return [f"does not compile: {error}"]
    return [f"{report.kernel}: {fault}" for report in found for fault in report.faults()]


def compile_all(
    architecture: str, shipped: dict[ShapeClass, Sizes], processes: int
) -> dict[ShapeClass, list[str]]:
    """Faults of what is shipped and of every candidate, by shape; compiled `processes` at a time.

    What is shipped goes first: most of a candidate's kernels are its. The exact backward is not tuned: two
    thirds of it are the vendor's.
    """
    jobs = [(shape, sizes, exact) for shape, sizes in shipped.items() for exact in (False, True)]
    for shape, sizes in shipped.items():
        jobs += [(shape, tried, False) for _, _, tried in candidates(sizes, architecture)]
    found: dict[ShapeClass, list[str]] = {shape: [] for shape in shipped}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        faults = pool.map(partial(compile_one, architecture), *zip(*jobs, strict=True))
        for (shape, _, _), its in zip(jobs, faults, strict=True):
            found[shape] += its
    return found


# Measurement ---------------------------------------------------------------------------------------------


class Bench:
    """One shape on the GPU: times and checks of the forward and of the sparse backward under given sizes."""

    def __init__(self, shape: ShapeClass, device: torch.device) -> None:
        sizes = TOKENS, shape.hidden, shape.vocabulary
        setting = Setting("histogram", *sizes, FORWARD_BACKWARD, shape.trainable, "bfloat16")
        self.problem = make_problem(setting, device, 0, load_histogram(HISTOGRAM))
        self.device = device
        self.wanted = Wanted(hidden=True, weight=shape.trainable, bias=False)
        head = Head(self.problem)
        self.forward = head.forward()
        self.exact = head.backward(self.forward, self.wanted, exact=True)

    def run(self, stage: str, head: Head) -> Any:
        """One repetition of what the stage is judged by."""
        return head.forward() if stage == FORWARD else head.backward(self.forward, self.wanted)

    def fault(self, stage: str, outcome: Any) -> str | None:
        """What is wrong with a result; None where it is right."""
        if stage == FORWARD:
            difference = outcome[0].logsumexp - self.forward[0].logsumexp
            worst = difference.abs().nan_to_num(nan=torch.inf).max().item()
            return None if worst <= 1e-3 else f"log-sum-exp off by {worst:.2g}"
        pairs = [(a.float(), b.float()) for a, b in zip(outcome, self.exact, strict=True) if b is not None]
        worst = max(float(((a - b).norm() / b.norm()).nan_to_num(nan=torch.inf)) for a, b in pairs)
        return None if worst <= WORST_GRADIENT else f"relative error {worst:.2g}"

    def compare(self, stage: str, incumbent: Sizes, candidate: Sizes) -> tuple[float, float, str | None]:
        """Medians in milliseconds, taken in turns, and what is wrong with the candidate."""

        def prepare(sizes: Sizes) -> Prepared:
            with planned_with(sizes):
                head = Head(self.problem)
            if sizes is candidate and (fault := self.fault(stage, self.run(stage, head))):
                raise Unsupported(fault)
            return Prepared(lambda _: self.run(stage, head))

        before, after = (Entrant("", partial(prepare, sizes)) for sizes in (incumbent, candidate))
        contest = Contest({}, [before, after], self.device, memory=False)
        contest.measure(math.inf, ROUNDS)
        found = contest.results()
        old, new = (math.nan if one.time is None else one.time.median for one in found)
        return old, new, found[1].reason or None


def tune_shape(bench: Bench, sizes: Sizes, architecture: str, deadline: float) -> tuple[Sizes, list[dict]]:
    """The best sizes found, and every comparison made."""
    best, log = sizes, []
    for stage, change, _ in candidates(sizes, architecture):
        if time.monotonic() > deadline:
            break
        candidate = changed(best, stage, change)
        before, after, fault = bench.compare(stage, best, candidate)
        kept = fault is None and after < before * (1 - LEAST_GAIN)
        name = f"{stage}: {', '.join(f'{key}={value}' for key, value in change.items())}"
        log.append({"candidate": name, "before": before, "after": after, "fault": fault, "kept": kept})
        print(json.dumps(log[-1]), flush=True)
        best = candidate if kept else best
    return best, log


def write_table(
    path: Path, table: Table, measured: dict[ShapeClass, Sizes], provenance: dict[str, str]
) -> None:
    """The table with the measured rules in place of those for the same shapes, sorted.

    Raises:
        ValueError: a table that could not be read back.
    """
    new = [Rule("half", s.hidden_up_to, s.trainable, True, sizes) for s, sizes in measured.items()]
    ranks = {rule.rank for rule in new}
    rules = sorted([*new, *(r for r in table.rules if r.rank not in ranks)], key=lambda rule: rule.rank)
    merged = Table(table.architecture, provenance, tuple(rules))
    if wrong := tuning.faults(merged, table.architecture):
        raise ValueError(f"the table found is not sound: {'; '.join(wrong)}")
    path.write_text(json.dumps(tuning.plain(merged), indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="time budget of the whole command (5)")
    parser.add_argument("--processes", type=int, default=8, help="compilers at a time (8)")
    parser.add_argument("--out", type=Path, help="the table; in place of the checked-in one unless given")
    parser.add_argument("--log", type=Path, help="every comparison, JSON")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tune: torch sees no CUDA device", file=sys.stderr)
        return 2
    device, deadline = torch.device("cuda"), time.monotonic() + 60 * options.minutes
    architecture = device_facts(device.type, device.index).architecture
    if architecture not in tuning.SHARED_MEMORY:
        raise ValueError(
            f"no table for {architecture}; there are tables for {', '.join(tuning.SHARED_MEMORY)}"
        )
    shipped = tuning.load_tables()[architecture]
    out = options.out or tuning.TABLES / f"{architecture}.json"
    about = environment(device)
    provenance = {
        "device": about["benchmark_device"], "date": about["started"], "command": " ".join(about["command"]),
        **{key: about["versions"].get(key, "unknown") for key in ("torch", "triton")},
    }  # fmt: skip
    starts = {shape: shipped.sizes("half", shape.hidden, shape.trainable) for shape in SHAPES}
    found: dict[ShapeClass, Sizes] = {}
    logs = []
    # All are compiled before the first measurement, which should have the machine to itself.
    for shape, faults in compile_all(architecture, starts, options.processes).items():
        if time.monotonic() > deadline:
            break
        print(json.dumps({"shape": vars(shape), "faults": faults}), flush=True)
        found[shape], log = tune_shape(Bench(shape, device), starts[shape], architecture, deadline)
        logs.append({"shape": vars(shape), "faults": faults, "tried": log})
        write_table(out, shipped, found, provenance)
        write_json(options.log, {"provenance": provenance, "shapes": logs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
