"""`python -m benchmarks smoke`: is the head right on this device, at the sizes it is used at?

Every implementation of ours, forward and backward, on every loss, against the oracle in float64. A minute on
a GPU, first compilation included; worth it before any time is believed. The exit code is 1 where a result is
further off than rounding explains.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from .contest import Contest, Limits
from .head_contest import HeadContests
from .live_tiles import HISTOGRAM, load_histogram
from .measure import FAILED, OK, SKIPPED
from .peers import Peer, choose_names
from .peers.ours import PEERS
from .problem import CROSS_ENTROPY, FORWARD_BACKWARD, GRPO, LOGPROB, PRODUCT, Outcome, Problem, Run, Setting
from .record import Measurement
from .rows import Sources
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
LARGEST_ERROR = {"logprob": 1e-4, "loss": 1e-4, "hidden_gradient": 8e-3, "weight_gradient": 8e-3}
"""Several times what rounding gradients to half precision and the default tolerance cost together."""


class Judged:
    """A contest whose results are failures where they are wrong."""

    def __init__(self, contest: Contest) -> None:
        self.shape = contest.shape
        self._contest = contest

    def measure(self, limits: Limits) -> None:
        """Raises DeviceLost where the device takes no more work."""
        self._contest.measure(limits)

    def results(self) -> list[Measurement]:
        return [judged(one) for one in self._contest.results() if one.implementation != PRODUCT]


def judged(found: Measurement) -> Measurement:
    """The measurement, failed where an error is NaN or beyond its limit."""
    limits = LARGEST_ERROR
    if found.shape["dtype"] == "float32":
        limits = limits | {"hidden_gradient": 5e-3, "weight_gradient": 5e-3}
    wrong = [
        f"{name.replace('_', ' ')} off by {error:.1e}"
        for name, error in found.accuracy.items()
        if not error <= limits[name]
    ]
    return replace(found, status=FAILED, reason=f"WRONG: {', '.join(wrong)}") if wrong else found


def plausible(peer: Peer) -> Peer:
    """The peer, whose impossible results raise ArithmeticError: the oracle looks at samples alone."""

    def prepare(problem: Problem) -> Run:
        run = peer.prepare(problem)

        def checked() -> Outcome:
            outcome = run()
            results = {
                "a log-probability": outcome.logprobs, "dX": problem.hidden.grad, "dW": problem.weight.grad
            }  # fmt: skip
            for name, result in results.items():
                if result is not None and not result.isfinite().all():
                    raise ArithmeticError(f"WRONG: {name} not finite")
            if outcome.logprobs is not None and (outcome.logprobs > 0).any():
                raise ArithmeticError("WRONG: a log-probability above 0")
            return outcome

        return checked

    return Peer(peer.name, prepare)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=2, repeats=1)


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    names = choose_names([peer.name for peer in PEERS], options.impl)
    sources = Sources(histogram=load_histogram(HISTOGRAM) if HISTOGRAM.is_file() else None)
    settings = []
    for rows, tokens, hidden, vocabulary in _SIZES[device.type]:
        usable = rows if rows != "histogram" or sources.histogram else "peaked"
        mode = FORWARD_BACKWARD
        first = Setting(usable, tokens, hidden, vocabulary, mode, True, options.dtype, LOGPROB)
        settings += [first, replace(first, trainable=False)]
        if not settings[2:]:
            settings += [replace(first, loss=loss) for loss in (GRPO, CROSS_ENTROPY)]
    peers = [plausible(peer) for peer in PEERS if peer.name in names]
    contests = HeadContests(peers, sources, device, options.seed)
    bouts = [Judged(contests.contest(setting)) for setting in settings]
    code = run_session(KIND, options, device, bouts)
    found = [one for bout in bouts for one in bout.results()]
    right = [one for one in found if one.status == OK]
    failed = [one for one in found if one.status not in (OK, SKIPPED)]
    for one in failed:
        print(f"{one.implementation} at {label(one.shape)}: {one.reason or one.status}")
    verdict = "WRONG, do not believe any time" if failed else "right" if right else "nothing was tried"
    print(f"smoke: {verdict}; {len(right)} of {len(found)} trials right", flush=True)
    return code or int(bool(failed) or not right)
