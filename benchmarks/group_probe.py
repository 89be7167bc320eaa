"""One update of one group in a process of its own: whether it fits, and what it took.

The parent watches the child's memory on a CPU and ends it beyond the budget; on CUDA the allocator itself
refuses. A server process imports the libraries once and forks for each probe, so that a probe starts at
once; what the libraries take does not count.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from . import host_memory
from .failures import ERROR, OK, OOM, failure_of
from .update import TRL

_POLL_SECONDS = 0.02
_LIBRARIES = ("torch", "transformers", "grpo_fast.policy", f"{__package__}.update")
_LIBRARIES_OF = {TRL: ("trl.trainer.grpo_trainer",)}


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
    """`state` is one of `failures`'; bytes are of model, optimizer and update together."""

    state: str
    reason: str = ""
    seconds: float = 0.0  # of the second update: the first compiles, and makes the optimizer's state
    allocator: int | None = None
    driver: int | None = None


def preload(implementations: Sequence[str]) -> None:
    """What the server imports before the first probe; a library that is missing is passed over."""
    libraries = [*_LIBRARIES, *(name for key in implementations for name in _LIBRARIES_OF.get(key, ()))]
    multiprocessing.get_context("forkserver").set_forkserver_preload(libraries)


def run_probe(probe: Probe, *, timeout: float) -> Outcome:
    """Runs it in a child. A child that exceeds the budget is out of memory, one beyond the time is an
    error."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(asdict(probe), sender), daemon=True)
    child.start()
    sender.close()
    try:
        return _watch(probe, child, receiver, time.monotonic() + timeout)
    finally:
        child.kill()
        child.join()
        receiver.close()


def _watch(probe: Probe, child: Any, receiver: Connection, deadline: float) -> Outcome:
    """The child says first what it holds before the probe, then the outcome."""
    before = None
    while True:
        while not receiver.poll(_POLL_SECONDS):
            resident = host_memory.resident_bytes(child.pid) if probe.device == "cpu" else None
            taken = None if resident is None or before is None else resident - before
            if taken is not None and probe.budget is not None and taken > probe.budget:
                return Outcome(OOM, driver=taken)
            if time.monotonic() > deadline:
                return Outcome(ERROR, "the time is up")
        try:
            message = receiver.recv()
        except EOFError:  # ended without a word: by the system, most likely for its memory
            return Outcome(OOM, "the system ended the process")
        if isinstance(message, dict):
            found = Outcome(**message)
            over = probe.budget is not None and found.driver is not None and found.driver > probe.budget
            return replace(found, state=OOM) if over and found.state == OK else found
        before = message


def _child(fields: dict[str, Any], sender: Connection) -> None:
    try:
        before = host_memory.resident_bytes()
        sender.send(before)
        outcome = _measure(Probe(**fields), before or 0)
    except Exception as error:
        outcome = Outcome(*failure_of(error))
    sender.send(asdict(outcome))
    sender.close()


def _measure(probe: Probe, before: int) -> Outcome:
    import torch

    from .architectures import architecture_of
    from .stopwatch import Stopwatch
    from .update import Update, entrant
    from .workload import make_samples

    device = torch.device(probe.device)
    if device.type == "cuda" and probe.budget is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, probe.budget / total), device)
    architecture = architecture_of(probe.model, probe.layers)
    lengths: Sequence[tuple[int, int]] = [(probe.prompt, probe.completion)] * probe.size
    samples, totals = make_samples(lengths, probe.size, architecture.vocabulary, seed=0)
    tokens = probe.size * (probe.prompt + probe.completion)
    update = Update(architecture, samples, totals, tokens, probe.dtype, device, options=dict(probe.options))
    prepared = entrant(probe.implementation, update).prepare()
    watch = Stopwatch(device)
    for _ in range(2):
        seconds, _ = watch.time(lambda: prepared.run(watch))
    prepared.close()
    if device.type == "cuda":
        return Outcome(
            OK,
            seconds=seconds,
            allocator=torch.cuda.max_memory_allocated(device),
            driver=torch.cuda.max_memory_reserved(device),
        )
    peak = host_memory.peak_bytes()
    return Outcome(OK, seconds=seconds, driver=None if peak is None else max(0, peak - before))
