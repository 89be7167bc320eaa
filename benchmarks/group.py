"""`python -m benchmarks group`: the largest group whose update fits, found by trying.

A group is one prompt with n completions of full length, in one forward and backward; micro-batches smaller
than a group would fit any. Each try is an update with its optimizer step, twice, in a process of its own: n
doubles until memory runs out, then the interval is halved. Beside what was found stands what the memory
planner predicts.

On a CPU `--memory` sets by how much a process may grow, whatever libraries allocate for themselves included;
the prediction does not count that. On CUDA the allocator itself refuses. A server process imports the
libraries once and forks for each try, so that a try starts at once; what they take does not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from grpo_fast.policy.config import ModelConfig

from . import step
from .contest import Limits
from .measure import (
    FAILED,
    NO_TIME,
    OK,
    OOM,
    SKIPPED,
    Memory,
    Stopwatch,
    failure_of,
    resident_bytes,
    summarise,
)
from .models import (
    Defaults,
    add_training_arguments,
    architecture,
    make_samples,
    model_section,
    training_shape,
    vocabulary_of,
)
from .peers import choose_names
from .record import Measurement
from .session import add_common_arguments, check_common, run_session

KIND = "group"
PREDICTED = "ours, predicted"
DEFAULTS = Defaults(
    ("Qwen2.5-1.5B", "Qwen2.5-0.5B"),
    "SmolLM2-135M",
    cpu_layers=1,
    sizes={
        "prompt": (128, 16, "tokens of the prompt"),
        "completion": (1024, 32, "tokens of a completion"),
        "largest": (1 << 16, 32, "group to try at most"),
    },
)
_CPU_GIB = 0.75
_TRY_SECONDS = 300.0
_LIBRARIES = ("torch", "transformers", "grpo_fast.policy", f"{__package__}.step")


@dataclass(frozen=True)
class Probe:
    """One group: `size` completions of `completion` tokens for one prompt, in one forward and backward."""

    implementation: str
    model: ModelConfig
    layers: int
    prompt: int  # tokens
    completion: int
    budget: int  # bytes beyond what the libraries take
    size: int = 0


def preload(implementations: Sequence[str]) -> None:
    """What the server imports before the first try; a library that is missing is passed over."""
    libraries = [*_LIBRARIES, *["trl.trainer.grpo_trainer"] * (step.TRL in implementations)]
    multiprocessing.get_context("forkserver").set_forkserver_preload(libraries)


def run_probe(probe: Probe, seconds: float = _TRY_SECONDS) -> Measurement:
    """Two updates in a child: beyond the budget it is out of memory, beyond the time it has failed.

    Bytes are of model, optimizer and update together; the time is the second's, since the first compiles.
    """
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(probe, sender), daemon=True)
    child.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(seconds) else {"status": FAILED, "reason": "the time is up"}
    except EOFError:  # ended without a word: by the system, most likely for its memory
        found = {"status": OOM, "reason": "the system ended the process"}
    finally:
        child.kill()
        child.join()
        receiver.close()
    return Measurement(probe.implementation, {}, **found)


def _child(probe: Probe, sender: Connection) -> None:
    try:
        found = _update_twice(probe)
    except Exception as error:
        found = dict(zip(("status", "reason"), failure_of(error), strict=True))
    sender.send(found)


def _update_twice(probe: Probe) -> dict[str, Any]:
    """Of a measurement."""
    device = torch.device(probe.model.device)
    held = resident_bytes() or 0
    _bound(probe.budget, device)
    lengths = [(probe.prompt, probe.completion)] * probe.size
    samples, totals = make_samples(lengths, probe.size, vocabulary_of(probe.model.path), seed=0)
    update = step.Update(probe.model, probe.layers, samples, totals, sum(map(sum, lengths)))
    prepared = step.entrant(probe.implementation, update).prepare()
    watch = Stopwatch(device)
    for _ in range(2):
        seconds, _ = watch.time(lambda: prepared.run(watch))
    prepared.close()
    if device.type == "cuda":
        memory = Memory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    else:
        memory = Memory(None, max(0, (resident_bytes(peak=True) or 0) - held))
    status = OK if memory.best <= probe.budget else OOM
    return {"status": status, "seconds": [seconds], "time": summarise([seconds]), "memory": memory}


def _bound(budget: int, device: torch.device) -> None:
    """Allocations beyond the budget fail.

    On a CPU what is mapped would count, which is more than is resident: the bound lies four times as high,
    and only keeps a try from taking the machine's memory.
    """
    statistics = Path("/proc/self/statm")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
    elif statistics.exists():
        mapped = int(statistics.read_text().split()[5]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (mapped + 4 * budget, hard))


def predict_group(probe: Probe) -> int | None:
    """Completions of one prompt whose update the memory planner sees fit; None where not even two do."""
    from grpo_fast.config import TrainConfig
    from grpo_fast.plan import Traces, device_budget
    from grpo_fast.plan.prediction import Predictor
    from grpo_fast.plan.search import MOST_GENERATIONS
    from grpo_fast.plan.sizes import StepSizes, largest

    config = TrainConfig.model_validate(
        {
            "model": probe.model,
            "dataset": {"source": "no data: only sizes are asked"},
            "rewards": [{"reward": "none"}],
            "rollout": {"engine": "transformers"},
        }
    )
    budget = replace(device_budget(), total=probe.budget)
    predictor = Predictor(config, Traces(architecture(probe.model.path, probe.layers)), budget)

    def fits(size: int) -> bool:
        group = StepSizes(1, size, probe.prompt, probe.completion, micro_batch_tokens=1 << 40)
        return sum(predictor.update(group).values()) <= probe.budget

    return largest(2, MOST_GENERATIONS, fits)


def next_size(tried: Mapping[int, Measurement], largest: int) -> int | None:
    """What to try next, from two on: twice the best, then the middle to the least that fails; None: done."""
    fits, fails = sizes(tried, OK), sizes(tried, OOM)
    if len(fits) + len(fails) < len(tried):  # something else went wrong
        return None
    best = max(fits, default=1)
    if not fails:
        return min(largest, 2 * best) if best < largest else None
    return (best + min(fails)) // 2 if min(fails) > best + 1 else None


def sizes(tried: Mapping[int, Measurement], status: str) -> list[int]:
    return [size for size, found in tried.items() if found.status == status]


@dataclass
class GroupBout:
    """The search at one shape, one implementation after another."""

    shape: dict[str, Any]
    probes: list[Probe]
    largest: int
    attempt: Callable[[Probe], Measurement]
    tried: dict[str, dict[int, Measurement]] = field(default_factory=dict)  # by implementation and size
    predicted: list[Measurement] = field(default_factory=list)

    def measure(self, limits: Limits) -> None:
        for probe in self.probes:
            if probe.implementation == step.OURS and not limits.passed:
                self.predicted.append(self._prediction(probe))
            tried = self.tried.setdefault(probe.implementation, {})
            while not limits.passed and (size := next_size(tried, self.largest)) is not None:
                tried[size] = self.attempt(replace(probe, size=size))

    def results(self) -> list[Measurement]:
        names = [probe.implementation for probe in self.probes]
        return [*(self._result(name, self.tried.get(name, {})) for name in names), *self.predicted]

    def _result(self, name: str, tried: dict[int, Measurement]) -> Measurement:
        for found in tried.values():
            if found.status not in (OK, OOM):
                return replace(found, shape=self.shape)
        fits, fails = sizes(tried, OK), sizes(tried, OOM)
        if not fits:
            missing = (OOM, "not even two completions fit") if fails else (SKIPPED, NO_TIME)
            return Measurement(name, self.shape, *missing)
        metrics = {"largest_group": float(max(fits))}
        if fails:
            metrics["smallest_that_fails"] = float(min(fails))
        exact = fails and next_size(tried, self.largest) is None
        reason = "" if exact else "at least: the next size was not tried"
        return replace(tried[max(fits)], shape=self.shape, reason=reason, metrics=metrics)

    def _prediction(self, probe: Probe) -> Measurement:
        try:
            group = predict_group(probe)
        except Exception as error:
            return Measurement(PREDICTED, self.shape, *failure_of(error))
        if group is None:
            return Measurement(PREDICTED, self.shape, OOM, "not even two")
        return Measurement(PREDICTED, self.shape, metrics={"largest_group": float(group)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=10, repeats=1)
    DEFAULTS.add_arguments(parser)
    usual = f"all of a GPU; on a CPU {_CPU_GIB}"
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help=f"of a process beyond its libraries ({usual})"
    )
    add_training_arguments(parser)


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    names = choose_names(list(step.IMPLEMENTATIONS), options.impl)
    tokens = DEFAULTS.chosen_sizes(options, device)
    largest = tokens.pop("largest")
    memory = options.memory
    if memory is None:
        on_gpu = device.type == "cuda"
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30 if on_gpu else _CPU_GIB
    if not memory > 0:
        raise ValueError(f"--memory must be above 0 GiB, got {memory}")
    budget = int(memory * 2**30)
    preload(names)
    bouts = []
    for model in DEFAULTS.chosen_models(options, device):
        section = model_section(options, model["model"], device)
        probes = [Probe(name, section, model["layers"], **tokens, budget=budget) for name in names]
        shape = {**model, **tokens, "memory_gib": memory, **training_shape(options)}
        bouts.append(GroupBout(shape, probes, largest, run_probe))
    return run_session(KIND, options, device, bouts)
