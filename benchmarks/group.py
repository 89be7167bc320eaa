"""`python -m benchmarks group`: the largest group whose update fits, found by trying.

A group is one prompt with n completions of full length, in one forward and backward; micro-batches smaller
than a group would fit any. Each try is an update with its optimizer step, twice, in a process of its own: n
doubles until memory runs out, then the interval is halved. Beside what was found stands what the memory
planner predicts.

On a CPU `--memory` sets by how much a process may grow: the parent watches, and ends it beyond that. That
counts what libraries allocate for themselves too, and the prediction does not. On CUDA the allocator itself
refuses. A server process imports the libraries once and forks for each try, so that a try starts at once;
what they take does not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

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
    add_model_arguments,
    add_training_arguments,
    architecture_of,
    chosen_models,
    make_samples,
    model_config,
    training_options,
)
from .peers import choose_names
from .record import Measurement
from .session import add_common_arguments, check_common, positive, run_session

KIND = "group"
PREDICTED = "ours, predicted"
_MODELS = {"cuda": ("Qwen2.5-1.5B", "Qwen2.5-0.5B"), "cpu": ("SmolLM2-135M",)}
# prompt, completion, largest group to try, layers, GiB
_SIZES = {"cuda": (128, 1024, 1 << 16, None, None), "cpu": (16, 32, 32, 1, 0.75)}
_TRY_SECONDS, _POLL_SECONDS = 300.0, 0.02
_LIBRARIES = ("torch", "transformers", "grpo_fast.policy", f"{__package__}.step")


@dataclass(frozen=True)
class Probe:
    """One group: `size` completions of `completion` tokens for one prompt, in one forward and backward."""

    implementation: str
    model: str
    layers: int | None
    size: int
    prompt: int  # tokens
    completion: int
    dtype: str
    device: str
    budget: int | None  # bytes beyond what the libraries take; None: all that the GPU has
    options: dict[str, Any]  # of `make_policy`


@dataclass(frozen=True)
class Outcome:
    """Of a try; bytes are of model, optimizer and update together."""

    status: str
    reason: str = ""
    seconds: float = 0.0  # of the second update: the first compiles, and makes the optimizer's state
    memory: Memory | None = None


def preload(implementations: Sequence[str]) -> None:
    """What the server imports before the first try; a library that is missing is passed over."""
    libraries = [*_LIBRARIES, *["trl.trainer.grpo_trainer"] * (step.TRL in implementations)]
    multiprocessing.get_context("forkserver").set_forkserver_preload(libraries)


def run_probe(probe: Probe, *, timeout: float) -> Outcome:
    """Runs it in a child: beyond the budget it is out of memory, beyond the time it has failed."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(probe, sender), daemon=True)
    child.start()
    sender.close()
    try:
        return _watch(probe, child.pid, receiver, time.monotonic() + timeout)
    finally:
        child.kill()
        child.join()
        receiver.close()


def _watch(probe: Probe, child: int, receiver: Connection, deadline: float) -> Outcome:
    """The child says first what it holds before the try, then the outcome."""
    before: int | None = None
    while True:
        while not receiver.poll(_POLL_SECONDS):
            resident = resident_bytes(child) if probe.device == "cpu" else None
            taken = 0 if resident is None or before is None else resident - before
            if probe.budget is not None and taken > probe.budget:
                return Outcome(OOM, memory=Memory(None, taken))
            if time.monotonic() > deadline:
                return Outcome(FAILED, "the time is up")
        try:
            message = receiver.recv()
        except EOFError:  # ended without a word: by the system, most likely for its memory
            return Outcome(OOM, "the system ended the process")
        if isinstance(message, Outcome):
            over = probe.budget is not None and message.memory and (message.memory.driver or 0) > probe.budget
            return replace(message, status=OOM) if over and message.status == OK else message
        before = message


def _child(probe: Probe, sender: Connection) -> None:
    try:
        before = resident_bytes()
        sender.send(before)
        outcome = _update_twice(probe, before or 0)
    except Exception as error:
        outcome = Outcome(*failure_of(error))
    sender.send(outcome)
    sender.close()


def _update_twice(probe: Probe, before: int) -> Outcome:
    device = torch.device(probe.device)
    if device.type == "cuda" and probe.budget is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, probe.budget / total), device)
    architecture = architecture_of(probe.model, probe.layers)
    lengths = [(probe.prompt, probe.completion)] * probe.size
    samples, totals = make_samples(lengths, probe.size, architecture.vocabulary, seed=0)
    tokens = probe.size * (probe.prompt + probe.completion)
    update = step.Update(
        architecture, samples, totals, tokens, probe.dtype, device, options=dict(probe.options)
    )
    prepared = step.entrant(probe.implementation, update).prepare()
    watch = Stopwatch(device)
    for _ in range(2):
        seconds, _ = watch.time(lambda: prepared.run(watch))
    prepared.close()
    if device.type == "cuda":
        counted = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return Outcome(OK, seconds=seconds, memory=Memory(*counted))
    peak = resident_bytes(peak=True)
    return Outcome(OK, seconds=seconds, memory=Memory(None, None if peak is None else max(0, peak - before)))


def predict_group(probe: Probe, device: torch.device) -> int | None:
    """Completions of one prompt that the memory planner sees fit; None where not even two do.

    Raises:
        ValueError: a model that the planner does not know.
    """
    from grpo_fast.config import TrainConfig
    from grpo_fast.plan.devices import device_budget
    from grpo_fast.plan.search import plan

    budget = device_budget()
    if probe.budget is not None:
        budget = replace(budget, total=probe.budget)
    config = TrainConfig.model_validate(
        {
            "model": {
                "path": probe.model,
                "dtype": probe.dtype,
                "device": device.type,
                "train_lm_head": not probe.options["freeze_head"],
                "gradient_checkpointing": probe.options["gradient_checkpointing"],
                "lora": probe.options["lora_rank"] and {"r": probe.options["lora_rank"]},
            },
            "dataset": {"source": "no data: only sizes are asked"},
            "rewards": [{"reward": "none"}],
            "prompts_per_step": 1,
            "rollout": {"engine": "transformers", "max_completion_length": probe.completion},
        }
    )
    shape = model_config(architecture_of(probe.model, probe.layers))
    return plan(config, shape, budget, prompt_length=probe.prompt, knobs=False).group_in_one_micro_batch


@dataclass
class Search:
    """The largest size that fits, between one that does and one that does not."""

    probe: Probe
    largest: int
    attempt: Callable[[Probe], Outcome] = lambda probe: run_probe(probe, timeout=_TRY_SECONDS)
    fits: dict[int, Outcome] = field(default_factory=dict)
    fails: dict[int, Outcome] = field(default_factory=dict)
    broken: Outcome | None = None  # neither fits nor runs out of memory

    @property
    def next_size(self) -> int | None:
        """What to try next; None: found."""
        best = max(self.fits, default=0)
        if not self.fails:
            return None if best >= self.largest else min(self.largest, max(2, 2 * best))
        least = min(self.fails)
        return None if least == 2 or least == best + 1 else (best + least) // 2

    @property
    def finished(self) -> bool:
        """Whether the next larger size is known to fail."""
        return bool(self.fails) and self.next_size is None

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
        return Measurement(
            name,
            shape,
            reason="" if self.finished else "at least: the next size was not tried",
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
    device: torch.device
    predicted: tuple[Measurement, ...] = ()

    def measure(self, limits: Limits) -> None:
        ours = [search.probe for search in self.searches if search.probe.implementation == step.OURS]
        if not limits.passed:
            self.predicted = tuple(self._predict(probe) for probe in ours)
        for search in self.searches:
            search.run(lambda: limits.passed)

    def results(self) -> list[Measurement]:
        return [*(search.result(self.shape) for search in self.searches), *self.predicted]

    def _predict(self, probe: Probe) -> Measurement:
        try:
            group = predict_group(probe, self.device)
        except Exception as error:
            return Measurement(PREDICTED, self.shape, *failure_of(error))
        if group is None:
            return Measurement(PREDICTED, self.shape, OOM, "not even two")
        return Measurement(PREDICTED, self.shape, metrics={"largest_group": float(group)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=10, repeats=1)
    add_model_arguments(parser, layers_on_cpu=1)
    parser.add_argument("--prompt", type=positive, help="tokens of the prompt (128; on a CPU 16)")
    parser.add_argument("--completion", type=positive, help="tokens of a completion (1024; on a CPU 32)")
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="of a process beyond its libraries (all of a GPU; on a CPU 0.75)",
    )
    parser.add_argument("--largest", type=positive, help="group to try at most (65536; on a CPU 32)")
    add_training_arguments(parser)


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    names = choose_names(list(step.IMPLEMENTATIONS), options.impl)
    asked = (options.prompt, options.completion, options.largest)
    *usual, layers, memory = _SIZES[device.type]
    prompt, completion, largest = (given or size for given, size in zip(asked, usual, strict=False))
    memory = options.memory or memory
    if memory is not None and not memory > 0:
        raise ValueError(f"--memory must be above 0 GiB, got {options.memory}")
    budget = None if memory is None else int(memory * 2**30)
    if memory is None:
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    made, said = training_options(options)
    preload(names)
    bouts = []
    for architecture in chosen_models(options, _MODELS[device.type], layers):
        sizes = {"model": architecture.name, "layers": architecture.layers}
        tokens = {"prompt": prompt, "completion": completion}
        shape = sizes | tokens | {"memory_gib": memory, **said, "dtype": options.dtype}
        template = Probe(
            implementation="",
            size=0,
            dtype=options.dtype,
            device=device.type,
            budget=budget,
            options=made,
            **sizes,
            **tokens,
        )
        searches = [Search(replace(template, implementation=name), largest) for name in names]
        bouts.append(GroupBout(shape, searches, device))
    return run_session(KIND, options, device, bouts)
