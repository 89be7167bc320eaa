"""`python -m benchmarks smoke`: is the head right on this device, at the sizes it is used at?

Every implementation of ours, forward and backward, on every loss, each once against the oracle in float64. A
minute on a GPU, first compilation included; worth it before any time is believed. The exit code is 1 where a
result is further off than rounding explains.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .accuracy import Accuracy, consult
from .contest import Limits
from .live_tiles import HISTOGRAM, load_histogram
from .measure import FAILED, NO_TIME, OK, SKIPPED, DeviceLost, at_most, failure_of, synchronize
from .peers import Peer, choose_names
from .peers.ours import PEERS
from .problem import CROSS_ENTROPY, FORWARD_BACKWARD, GRPO, LOGPROB, Outcome, Problem, Setting
from .record import Measurement
from .rows import Sources, make_problem
from .session import add_common_arguments, check_common, run_session
from .tables import label

KIND = "smoke"
_SIZES = {  # rows, N, H, V; the last has rows that no tensor descriptor addresses, and a ragged vocabulary
    "cuda": (
        ("histogram", 16_384, 2048, 151_936),
        ("peaked", 8192, 4096, 128_256),
        ("flat", 4096, 896, 151_936),
        ("peaked", 2047, 1004, 50_257),
    ),
    "cpu": (("histogram", 64, 64, 2048), ("peaked", 64, 96, 1000), ("flat", 63, 20, 301)),
}
_LIMITS = {
    torch.float32: Accuracy(logprob=1e-4, hidden_gradient=5e-3, weight_gradient=5e-3, loss=1e-4),
    torch.bfloat16: Accuracy(logprob=1e-4, hidden_gradient=8e-3, weight_gradient=8e-3, loss=1e-4),
    torch.float16: Accuracy(logprob=1e-4, hidden_gradient=8e-3, weight_gradient=8e-3, loss=1e-4),
}
"""Several times what rounding gradients to the dtype and the default tolerance cost together."""


class SmokeBout:
    """One batch, and every implementation on it once."""

    def __init__(
        self, setting: Setting, sources: Sources, peers: Sequence[Peer], device: torch.device
    ) -> None:
        self.shape: dict[str, Any] = dict(vars(setting))
        self._setting, self._sources, self._peers, self._device = setting, sources, peers, device
        self._found: list[Measurement] = []

    def measure(self, limits: Limits) -> None:
        """Raises DeviceLost where the device takes no more work."""
        try:
            problem = make_problem(self._setting, self._sources, self._device, limits.seed)
            oracle = consult(problem)
        except Exception as error:  # no memory for the batch, or for the oracle
            failure = failure_of(error)
            self._found = [self._measurement(peer, failure, None, {}) for peer in self._peers]
            return
        for peer in self._peers:
            start = time.perf_counter()
            accuracy, metrics, failure = None, {}, (SKIPPED, NO_TIME)
            try:
                if not limits.passed:
                    with at_most(limits.patience):
                        outcome = peer.prepare(problem)()
                        synchronize(self._device)
                    metrics = {"first_call_seconds": time.perf_counter() - start}
                    accuracy = oracle.judge(problem, outcome)
                    metrics |= {name: float(value) for name, value in (outcome.certificate or {}).items()}
                    failure = self._judged(problem, outcome, accuracy)
            except Exception as error:
                failure = failure_of(error)
            self._found.append(self._measurement(peer, failure, accuracy, metrics))
            self._clear(problem, peer, failure)

    def results(self) -> list[Measurement]:
        return self._found

    def _judged(self, problem: Problem, outcome: Outcome, accuracy: Accuracy) -> tuple[str, str]:
        """State and reason."""
        wrong = beyond(accuracy, _LIMITS[problem.hidden.dtype])
        results = {
            "log-probability": outcome.logprobs, "dX": problem.hidden.grad, "dW": problem.weight.grad
        }  # fmt: skip
        wrong += [f"{n} not finite" for n, t in results.items() if t is not None and not t.isfinite().all()]
        if outcome.logprobs is not None and (outcome.logprobs > 0).any():
            wrong.append("a log-probability above 0")
        return (FAILED, "WRONG: " + ", ".join(wrong)) if wrong else (OK, "")

    def _measurement(
        self, peer: Peer, failure: tuple[str, str], accuracy: Accuracy | None, metrics: dict[str, float]
    ) -> Measurement:
        errors = {} if accuracy is None else accuracy.errors
        return Measurement(peer.name, self.shape, *failure, accuracy=errors, metrics=metrics)

    def _clear(self, problem: Problem, peer: Peer, failure: tuple[str, str]) -> None:
        problem.clear()
        try:
            synchronize(self._device)
        except RuntimeError as lost:
            raise DeviceLost(peer.name, failure[1]) from lost


def beyond(found: Accuracy, limits: Accuracy) -> list[str]:
    """The errors that exceed their limits, NaN among them."""
    return [
        f"{name.replace('_', ' ')} off by {error:.1e}"
        for name, error in vars(found).items()
        if error is not None and not error <= getattr(limits, name)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=2, repeats=1)


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    peers = [peer for peer in PEERS if peer.name in choose_names([p.name for p in PEERS], options.impl)]
    sources = Sources(histogram=load_histogram(HISTOGRAM) if HISTOGRAM.is_file() else None)
    settings = []
    for rows, *sizes in _SIZES[device.type]:
        usable = rows if rows != "histogram" or sources.histogram else "peaked"
        first = Setting(usable, *sizes, FORWARD_BACKWARD, True, options.dtype, LOGPROB)
        settings += [first, replace(first, trainable=False)]
        if not settings[2:]:
            settings += [replace(first, loss=loss) for loss in (GRPO, CROSS_ENTROPY)]
    bouts = [SmokeBout(setting, sources, peers, device) for setting in settings]
    code = run_session(KIND, options, device, bouts)
    found = [one for bout in bouts for one in bout.results()]
    right = [one for one in found if one.status == OK]
    failed = [one for one in found if one.status not in (OK, SKIPPED)]
    for one in failed:
        print(f"{one.implementation} at {label(one.shape)}: {one.reason or one.status}")
    verdict = "WRONG, do not believe any time" if failed else "right" if right else "nothing was tried"
    print(f"smoke: {verdict}; {len(right)} of {len(bouts) * len(peers)} trials right", flush=True)
    return code or int(bool(failed) or not right)
