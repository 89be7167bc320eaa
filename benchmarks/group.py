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
from collections.abc import Callable, Sequence
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
    budget: int | None  # bytes beyond what the libraries take; None: all that the GPU has
    size: int = 0


@dataclass(frozen=True)
class Outcome:
    """Of a try; bytes are of model, optimizer and update together."""

    status: str
    reason: str = ""
    seconds: float = 0.0  # of the second update: the first compiles, and makes the optimizer's state
    memory: Memory | None = None


# One try --------------------------------------------------------------------------------------------------


def preload(implementations: Sequence[str]) -> None:
    """What the server imports before the first try; a library that is missing is passed over."""
    libraries = [*_LIBRARIES, *["trl.trainer.grpo_trainer"] * (step.TRL in implementations)]
    multiprocessing.get_context("forkserver").set_forkserver_preload(libraries)


def run_probe(probe: Probe, seconds: float = _TRY_SECONDS) -> Outcome:
    """Runs it in a child: beyond the budget it is out of memory, beyond the time it has failed."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(probe, sender), daemon=True)
    child.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else Outcome(FAILED, "the time is up")
    except EOFError:  # ended without a word: by the system, most likely for its memory
        return Outcome(OOM, "the system ended the process")
    finally:
        child.kill()
        child.join()
        receiver.close()


def _child(probe: Probe, sender: Connection) -> None:
    try:
        outcome = _update_twice(probe)
    except Exception as error:
        outcome = Outcome(*failure_of(error))
    sender.send(outcome)


def _update_twice(probe: Probe) -> Outcome:
    device = torch.device(probe.model.device)
    held = resident_bytes() or 0
    if probe.budget is not None:
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
        counted = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return Outcome(OK, seconds=seconds, memory=Memory(*counted))
    grown = max(0, (resident_bytes(peak=True) or 0) - held)
    fits = probe.budget is None or grown <= probe.budget
    return Outcome(OK if fits else OOM, seconds=seconds, memory=Memory(None, grown))


def _bound(budget: int, device: torch.device) -> None:
    """Allocations beyond the budget fail. On a CPU what is mapped counts, which is more than is resident: the
    bound lies higher, and only keeps a try from taking the machine's memory."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
    else:
        mapped = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (mapped + 4 * budget, hard))


def predict_group(probe: Probe) -> int | None:
    """Completions of one prompt that the memory planner sees fit; None where not even two do.

    Raises:
        ValueError: a model that the planner does not know.
    """
    from grpo_fast.config import TrainConfig
    from grpo_fast.plan import device_budget, plan

    budget = device_budget()
    if probe.budget is not None:
        budget = replace(budget, total=probe.budget)
    config = TrainConfig.model_validate(
        {
            "model": probe.model,
            "dataset": {"source": "no data: only sizes are asked"},
            "rewards": [{"reward": "none"}],
            "prompts_per_step": 1,
            "rollout": {"engine": "transformers", "max_completion_length": probe.completion},
        }
    )
    shape = architecture(probe.model.path, probe.layers)
    return plan(config, shape, budget, prompt_length=probe.prompt, knobs=False).group_in_one_micro_batch


# The search -----------------------------------------------------------------------------------------------


@dataclass
class Search:
    """The largest size that fits, between one that does and one that does not."""

    probe: Probe
    largest: int
    attempt: Callable[[Probe], Outcome]
    fits: dict[int, Outcome] = field(default_factory=dict)
    fails: dict[int, Outcome] = field(default_factory=dict)
    broken: Outcome | None = None  # neither fits nor runs out of memory

    @property
    def next_size(self) -> int | None:
        """What to try next, from two on; None: found."""
        best = max(self.fits, default=1)
        if not self.fails:
            return None if best >= self.largest else min(self.largest, 2 * best)
        least = min(self.fails)
        return None if least == best + 1 else (best + least) // 2

    def run(self, stop: Callable[[], bool]) -> None:
        while not stop() and self.broken is None and (size := self.next_size) is not None:
            outcome = self.attempt(replace(self.probe, size=size))
            if outcome.status == OK:
                self.fits[size] = outcome
            elif outcome.status == OOM:
                self.fails[size] = outcome
            else:
                self.broken = outcome

    def result(self, shape: dict[str, Any]) -> Measurement:
        name = self.probe.implementation
        if self.broken is not None:
            return Measurement(name, shape, self.broken.status, self.broken.reason)
        if not self.fits:
            missing = (OOM, "not even two completions fit") if self.fails else (SKIPPED, NO_TIME)
            return Measurement(name, shape, *missing)
        best = max(self.fits)
        metrics = {"largest_group": float(best)}
        if self.fails:
            metrics["smallest_that_fails"] = float(min(self.fails))
        found = bool(self.fails) and self.next_size is None
        return Measurement(
            name,
            shape,
            reason="" if found else "at least: the next size was not tried",
            seconds=[self.fits[best].seconds],
            time=summarise([self.fits[best].seconds]),
            memory=self.fits[best].memory,
            metrics=metrics,
        )


@dataclass
class GroupBout:
    """The search for one shape, one implementation after another."""

    shape: dict[str, Any]
    searches: list[Search]
    predicted: list[Measurement] = field(default_factory=list)

    def measure(self, limits: Limits) -> None:
        for search in self.searches:
            if search.probe.implementation == step.OURS and not limits.passed:
                self.predicted.append(self._predict(search.probe))
            search.run(lambda: limits.passed)

    def results(self) -> list[Measurement]:
        return [*(search.result(self.shape) for search in self.searches), *self.predicted]

    def _predict(self, probe: Probe) -> Measurement:
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
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    names = choose_names(list(step.IMPLEMENTATIONS), options.impl)
    sizes = DEFAULTS.chosen_sizes(options, device)
    largest = sizes.pop("largest")
    memory = options.memory
    if memory is not None and not memory > 0:
        raise ValueError(f"--memory must be above 0 GiB, got {memory}")
    if memory is None and device.type == "cpu":
        memory = _CPU_GIB
    budget = None if memory is None else int(memory * 2**30)
    if memory is None:
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    preload(names)
    bouts = []
    for model in DEFAULTS.chosen_models(options, device):
        section = model_section(options, model["model"], device)
        probes = [Probe(name, section, model["layers"], **sizes, budget=budget) for name in names]
        shape = {**model, **sizes, "memory_gib": memory, **training_shape(options)}
        bouts.append(GroupBout(shape, [Search(probe, largest, run_probe) for probe in probes]))
    return run_session(KIND, options, device, bouts)
