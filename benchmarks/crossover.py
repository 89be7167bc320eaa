"""`python -m benchmarks crossover`: the head against density, and where the exact backward overtakes.

Rows are made from a model's histogram of live tiles, thinned or multiplied; the density that counts is the
one that the certified backward then visits. Below the crossover leaving tiles out pays, above it forming the
whole gradient does.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from .cell import CellRun, Limits
from .goals import EXACT, OURS
from .live_tiles import HISTOGRAM, Histogram, load_histogram
from .peers import Peer, all_peers
from .problem import FORWARD_BACKWARD, Setting
from .record import OK, Measurement, measurements
from .row_sources import Sources
from .session import add_common_arguments, check_common, choose_names, positive, run_session

KIND = "crossover"
KEPT = "ours, tolerance 0, kept"
_NAMES = (OURS, EXACT, KEPT)
_FACTORS = (1.0, 4.0, 0.3, 8.0, 2.0, 16.0)  # of the live tiles; what brackets the answer comes first
_SIZES = {"cuda": (16_384, 2048, 151_936), "cpu": (64, 64, 8192)}


class DensityBout:
    """The head's ways through the same rows, at one density."""

    def __init__(
        self,
        setting: Setting,
        factor: float,
        histogram: Histogram,
        peers: Sequence[Peer],
        device: torch.device,
    ) -> None:
        self.shape: dict[str, Any] = {"factor": factor, **vars(setting)}
        self._cell = (setting, Sources(histogram=multiplied(histogram, factor)), device)
        self._peers = peers
        self._found: list[Measurement] = []

    def measure(self, limits: Limits) -> None:
        run = CellRun(*self._cell, limits, self._peers)
        try:
            run.measure()
        finally:
            self._found = [replace(one, shape=self.shape) for one in measurements(run.result())]

    def results(self) -> list[Measurement]:
        return self._found


def multiplied(histogram: Histogram, factor: float) -> Histogram:
    """With so many times the live tiles in every row, from one to all."""
    rows: Counter[int] = Counter()
    for live, count in histogram.rows_by_live_tiles.items():
        rows[min(histogram.tiles, max(1, round(factor * live)))] += count
    return replace(histogram, source=f"{histogram.source}, {factor:g} times", rows_by_live_tiles=dict(rows))


def crossover(found: Sequence[Measurement]) -> list[Measurement]:
    """The density at which both take the same time, between measured ones; nothing where they never do."""
    times: dict[float, dict[str, Measurement]] = {}
    for one in found:
        if one.status == OK and one.time is not None:
            times.setdefault(one.shape["factor"], {})[one.implementation] = one
    both = [by_name for by_name in times.values() if {OURS, EXACT} <= by_name.keys()]
    curve = sorted((of[OURS].metrics["density"], _advantage(of)) for of in both)
    for (low, before), (high, after) in pairwise(curve):
        if before >= 0 > after:
            density = low + (high - low) * before / (before - after)
            return [Measurement(OURS, {"fit": "density"}, metrics={"crossover_density": density})]
    return []


def _advantage(of: dict[str, Measurement]) -> float:
    """Milliseconds by which leaving out is faster."""
    return of[EXACT].time.median - of[OURS].time.median


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=3, repeats=15)
    parser.add_argument("--factors", type=float, nargs="+", default=_FACTORS, help="times the live tiles")
    parser.add_argument("--histogram", type=Path, metavar="FILE", help="live tiles of a model's rows, JSON")
    parser.add_argument("--frozen", action="store_true", help="no gradient for the head")
    for name, what in (("tokens", "N"), ("hidden", "H"), ("vocab", "V")):
        parser.add_argument(f"--{name}", type=positive, help=what)


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    if not all(factor > 0 for factor in options.factors):
        raise ValueError(f"--factors must be above 0, got {options.factors}")
    histogram = load_histogram(options.histogram or HISTOGRAM)
    names = choose_names(_NAMES, options.impl)
    peers = [peer for peer in all_peers() if peer.name in names]
    sizes = (options.tokens, options.hidden, options.vocab)
    tokens, hidden, vocabulary = (
        given or usual for given, usual in zip(sizes, _SIZES[device.type], strict=True)
    )
    setting = Setting(
        "histogram", tokens, hidden, vocabulary, FORWARD_BACKWARD, not options.frozen, options.dtype
    )
    bouts = [DensityBout(setting, factor, histogram, peers, device) for factor in options.factors]
    return run_session(KIND, options, device, bouts, conclude=crossover)
