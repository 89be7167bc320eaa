"""`python -m benchmarks group`: the largest group whose update fits, found by trying.

A group is one prompt with n completions of full length, in one forward and backward; micro-batches smaller
than a group would fit any. Each try is an update with its optimizer step, twice, in a process of its own: n
doubles until memory runs out, then the interval is halved. On a CPU `--memory` sets by how much a process may
grow. That counts what libraries allocate for themselves too, and the planner's prediction does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from . import update
from .architectures import ARCHITECTURES, architecture_of
from .cell import Limits
from .failures import LATE, OK, OOM, failure_of
from .group_prediction import predict_group
from .group_probe import Outcome, Probe, preload, run_probe
from .record import STATUS, Measurement
from .session import add_common_arguments, check_common, choose_names, positive, run_session
from .timing import Memory, summarise

KIND = "group"
PREDICTED = "ours, predicted"
_MODELS = {"cuda": ("Qwen2.5-1.5B", "Qwen2.5-0.5B"), "cpu": ("SmolLM2-135M",)}
_SIZES = {"cuda": (128, 1024, None, None), "cpu": (16, 32, 1, 0.75)}  # prompt, completion, layers, GiB
_LARGEST, _LARGEST_ON_CPU = 1 << 16, 32
_PROBE_SECONDS = 300.0


class GroupBout:
    """The search for one shape, one implementation after another."""

    def __init__(
        self, shape: dict[str, Any], probes: list[Probe], *, largest: int, device: torch.device
    ) -> None:
        self.shape = shape
        self._device = device
        self._searches = [Search(probe, largest) for probe in probes]
        self._of_ours = next((probe for probe in probes if probe.implementation == update.OURS), None)
        self._predicted: list[Measurement] = []

    def measure(self, limits: Limits) -> None:
        if self._of_ours is not None and not limits.passed:
            self._predicted = [self._predict(self._of_ours)]
        for search in self._searches:
            search.run(lambda: limits.passed)

    def results(self) -> list[Measurement]:
        return [*(search.result(self.shape) for search in self._searches), *self._predicted]

    def _predict(self, probe: Probe) -> Measurement:
        try:
            group = predict_group(probe, self._device)
        except Exception as error:
            state, reason = failure_of(error)
            return Measurement(PREDICTED, self.shape, STATUS[state], reason)
        if group is None:
            return Measurement(PREDICTED, self.shape, STATUS[OOM], "not even two")
        return Measurement(PREDICTED, self.shape, metrics={"largest_group": float(group)})


class Search:
    """The largest size that fits, between one that does and one that does not."""

    def __init__(self, probe: Probe, largest: int, attempt: Callable[[Probe], Outcome] | None = None) -> None:
        self._probe = probe
        self._largest = largest
        self._attempt = attempt or (lambda probe: run_probe(probe, timeout=_PROBE_SECONDS))
        self.fits: dict[int, Outcome] = {}
        self.fails: dict[int, Outcome] = {}
        self.broken: Outcome | None = None  # neither fits nor runs out of memory
        self.started = False

    @property
    def next_size(self) -> int | None:
        """What to try next; None: found."""
        best = max(self.fits, default=0)
        if not self.fails:
            return None if best >= self._largest else min(self._largest, max(2, 2 * best))
        least = min(self.fails)
        return None if least == 2 or least == best + 1 else (best + least) // 2

    @property
    def finished(self) -> bool:
        """Whether the next larger size is known to fail."""
        return bool(self.fails) and self.next_size is None

    def run(self, stop: Callable[[], bool]) -> None:
        while not stop() and self.broken is None and (size := self.next_size) is not None:
            self.started = True
            outcome = self._attempt(replace(self._probe, size=size))
            if outcome.state == OK:
                self.fits[size] = outcome
            elif outcome.state == OOM:
                self.fails[size] = outcome
            else:
                self.broken = outcome

    def result(self, shape: dict[str, Any]) -> Measurement:
        name = self._probe.implementation
        if self.broken is not None:
            return Measurement(name, shape, STATUS[self.broken.state], self.broken.reason)
        if not self.started:
            return Measurement(name, shape, STATUS[LATE], LATE)
        if not self.fits:
            return Measurement(name, shape, STATUS[OOM], "not even two completions fit")
        best = max(self.fits)
        found = self.fits[best]
        metrics = {"largest_group": float(best)}
        if self.fails:
            metrics["smallest_that_fails"] = float(min(self.fails))
        return Measurement(
            name,
            shape,
            reason="" if self.finished else "at least: the next size was not tried",
            seconds=[found.seconds],
            time=summarise([found.seconds]),
            memory=Memory(found.allocator, found.driver),
            metrics=metrics,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=10, repeats=1)
    parser.add_argument(
        "--model", nargs="+", choices=ARCHITECTURES, help="those that suit the device, unless given"
    )
    parser.add_argument("--layers", type=positive, help="only so many of its layers (on a CPU 1)")
    parser.add_argument("--prompt", type=positive, help="tokens of the prompt (128; on a CPU 16)")
    parser.add_argument("--completion", type=positive, help="tokens of a completion (1024; on a CPU 32)")
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="of a process beyond its libraries (all of a GPU; on a CPU 0.75)",
    )
    parser.add_argument("--largest", type=positive, help="group to try at most (65536; on a CPU 32)")
    parser.add_argument("--lora", type=positive, metavar="RANK", help="train adapters of this rank only")
    parser.add_argument("--frozen", action="store_true", help="no gradient for the head")
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="recompute each layer's activations"
    )


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    names = choose_names(update.IMPLEMENTATIONS, options.impl)
    prompt, completion, layers, memory = _SIZES[device.type]
    memory = options.memory or memory
    if memory is not None and not memory > 0:
        raise ValueError(f"--memory must be above 0 GiB, got {options.memory}")
    budget = None if memory is None else int(memory * 2**30)
    preload(names)
    largest = options.largest or (_LARGEST if device.type == "cuda" else _LARGEST_ON_CPU)
    bouts = []
    for model in options.model or _MODELS[device.type]:
        architecture = architecture_of(model, options.layers or (None if options.model else layers))
        template = Probe(
            implementation="",
            model=model,
            layers=architecture.layers,
            size=0,
            prompt=options.prompt or prompt,
            completion=options.completion or completion,
            dtype=options.dtype,
            device=device.type,
            budget=budget,
            options={
                "lora_rank": options.lora,
                "freeze_head": options.frozen,
                "gradient_checkpointing": options.gradient_checkpointing,
            },
        )
        shape = {
            "model": model,
            "layers": architecture.layers,
            "prompt": template.prompt,
            "completion": template.completion,
            "memory_gib": memory if memory is not None else _total_gib(device),
            "trained": f"LoRA r = {options.lora}"
            if options.lora
            else "all but the head"
            if options.frozen
            else "all",
            "gradient_checkpointing": options.gradient_checkpointing,
            "dtype": options.dtype,
        }
        probes = [replace(template, implementation=name) for name in names]
        bouts.append(GroupBout(shape, probes, largest=largest, device=device))
    return run_session(KIND, options, device, bouts)


def _total_gib(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory / 2**30
