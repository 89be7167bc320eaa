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

from .goals import EXACT
from .head import HeadContests
from .live_tiles import HISTOGRAM, Histogram, load_histogram
from .peers import choose
from .peers.ours import PEERS
from .problem import FORWARD_BACKWARD, Setting
from .record import Measurement
from .session import add_common_arguments, add_sizes, check_common, run_session
from .tables import OURS

_FACTORS = (1.0, 4.0, 0.3, 8.0, 2.0, 16.0)  # of the live tiles; what brackets the answer comes first
_SIZES = {
    "tokens": (16_384, 64, "tokens N"),
    "hidden": (2048, 64, "hidden size H"),
    "vocab": (151_936, 8192, "vocabulary V"),
}


def multiplied(histogram: Histogram, factor: float) -> Histogram:
    """With so many times the live tiles in every row, from one to all."""
    rows: Counter[int] = Counter()
    for live, count in histogram.rows_by_live_tiles.items():
        rows[min(histogram.tiles, max(1, round(factor * live)))] += count
    return replace(histogram, source=f"{histogram.source}, {factor:g} times", rows_by_live_tiles=dict(rows))


def crossover(found: Sequence[Measurement]) -> list[Measurement]:
    """The density at which both take the same time, between measured ones; nothing where they never do."""
    by_factor: dict[float, dict[str, Measurement]] = {}
    for one in found:
        if one.time is not None:
            by_factor.setdefault(one.shape["factor"], {})[one.implementation] = one
    curve = sorted(
        (of[OURS].metrics["density"], of[EXACT].time.median - of[OURS].time.median)
        for of in by_factor.values()
        if {OURS, EXACT} <= of.keys()
    )  # density, and the milliseconds by which leaving out is faster
    for (low, before), (high, after) in pairwise(curve):
        if before >= 0 > after:
            density = low + (high - low) * before / (before - after)
            return [Measurement(OURS, {"fit": "density"}, metrics={"crossover_density": density})]
    return []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=3, repeats=15)
    add_sizes(parser, _SIZES)
    parser.add_argument("--factors", type=float, nargs="+", default=_FACTORS, help="times the live tiles")
    parser.add_argument(
        "--histogram", type=Path, default=HISTOGRAM, metavar="FILE", help="of live tiles, JSON"
    )


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    if not all(factor > 0 for factor in options.factors):
        raise ValueError(f"--factors must be above 0, got {options.factors}")
    histogram = load_histogram(options.histogram)
    peers = choose([peer for peer in PEERS if "reference" not in peer.name], options.impl)
    sizes = options.tokens, options.hidden, options.vocab
    setting = Setting("histogram", *sizes, FORWARD_BACKWARD, True, options.dtype)
    contests = HeadContests(peers, device, options.seed)
    bouts = [contests.contest(setting, multiplied(histogram, f), factor=f) for f in options.factors]
    return run_session(options, bouts, conclude=crossover)
