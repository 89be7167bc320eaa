"""Find the largest group whose update fits, by trying.

A group is one prompt with n completions of full length, in one forward and backward; micro-batches smaller
than a group would fit any. Each try is two updates with their optimizer steps, in a process of its own: n
doubles until memory runs out, then the interval is halved. Bytes are those of model, optimizer and update. On
a CPU `--memory` limits by how much a process may grow, libraries included. On CUDA the allocator refuses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from grpo_fast.config.policy import ModelConfig

from . import measure, step
from .models import add_models, chosen_models
from .peers import choose
from .record import Measurement
from .session import Shape, add_common_arguments, add_sizes, by_device, check_common, run_session, sizes_of

SIZES = {
    "prompt": (128, 16, "tokens of the prompt"),
    "completion": (1024, 32, "tokens of a completion"),
    "largest": (1 << 16, 32, "group to try at most"),
}
_CPU_GIB = 0.75
_TRY_SECONDS = 300.0


@dataclass(frozen=True)
class Probe:
    """`size` completions of `completion` tokens for one prompt, in one forward and backward."""

    implementation: str
    model: ModelConfig
    layers: int
    prompt: int  # tokens
    completion: int
    budget: int  # bytes beyond what the libraries take
    size: int = 0


def run_probe(probe: Probe, shape: Shape) -> Measurement:
    """Try one size; beyond the budget it is out of memory."""
    cell = Measurement(probe.implementation, shape)
    try:
        device = torch.device(probe.model.device)
        allocated, grown = measure.in_a_process(device, _try, probe, seconds=_TRY_SECONDS)
    except measure.Failure as failure:
        cell.status, cell.reason = failure.args
        return cell
    cell.peak_bytes = grown if allocated is None else allocated
    cell.status = measure.OK if cell.peak_bytes <= probe.budget else measure.OOM
    return cell


def _try(probe: Probe) -> int | None:
    """Update twice, since Adam's moments are there from the second time on; return torch's peak on a GPU."""
    device = torch.device(probe.model.device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, probe.budget / total), device)
    lengths = [(probe.prompt, probe.completion)] * probe.size
    update = step.Update(probe.model, probe.layers, lengths, probe.size, sum(map(sum, lengths)))
    prepared = step.PREPARE[probe.implementation](update)
    for _ in range(2):
        prepared.run(measure.Stopwatch(device))
    prepared.close()
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def search(probe: Probe, shape: Shape, largest: int, deadline: float) -> Measurement:
    """Double the group from one until memory runs out, then go halfway to what did not fit.

    No try begins after the deadline, on the monotonic clock.
    """
    fits, fails = 1, None
    best = Measurement(probe.implementation, shape, measure.SKIPPED, measure.NO_TIME)
    while time.monotonic() < deadline:
        size = min(largest, 2 * fits) if fails is None else (fits + fails) // 2
        if size == fits:
            break
        found = run_probe(replace(probe, size=size), shape)
        if found.status == measure.OK:
            fits, best = size, found
        elif found.status == measure.OOM:
            fails = size
        else:
            return found
    if fits > 1:
        best.metrics = {"largest_group": float(fits)}
        best.reason = "" if fails == fits + 1 else "at least: the next size was not tried"
    elif fails:
        best.status, best.reason = measure.OOM, "not even two fit"
    return best


def search_all(
    probes: Sequence[Probe], shape: Shape, largest: int, deadline: float, _: int
) -> list[Measurement]:
    """Search one implementation after the other; each has its share of the time that is left."""
    cells = []
    for index, probe in enumerate(probes):
        left = (deadline - time.monotonic()) / (len(probes) - index)
        cells.append(search(probe, shape, largest, time.monotonic() + left))
    return cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=10, repeats=1)
    add_models(parser, ["Qwen2.5-1.5B", "Qwen2.5-0.5B"], ["SmolLM2-135M"], cpu_layers=1)
    add_sizes(parser, SIZES)
    of_memory = f"of a process beyond its libraries (all of a GPU; on a CPU {_CPU_GIB})"
    memory = by_device(None, _CPU_GIB)
    parser.add_argument("--memory", type=float, metavar="GIB", default=memory, help=of_memory)


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    names = choose(list(step.IMPLEMENTATIONS), options.impl)
    if options.memory is None:
        options.memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    if not options.memory > 0:
        raise ValueError(f"--memory must be above 0 GiB, got {options.memory}")
    tokens = sizes_of(options, SIZES)
    largest = tokens.pop("largest")
    measure.preload(step.__name__, *["trl.trainer.grpo_trainer"] * (step.TRL in names))
    bouts = []
    for model, shape in chosen_models(options):
        budget = int(options.memory * 2**30)
        probes = [Probe(name, model, shape["layers"], **tokens, budget=budget) for name in names]
        shape |= {**tokens, "memory_gib": options.memory, "dtype": options.dtype}
        bouts.append((shape, partial(search_all, probes, shape, largest)))
    return run_session(options, bouts)
