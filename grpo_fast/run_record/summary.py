"""Numbers as a person reads them: confidence intervals, percentages, durations, bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95
PHASES = ("generate", "reward", "logprobs", "update", "exchange", "eval")  # of a step: `time/<phase>`

Interval = tuple[float, float]  # (low, high)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Confidence interval (low, high) of the mean of independent values.

    Values that are all 0 or 1 are a proportion and get the score interval of Wilson (1927, JASA 22,
    p. 209), which stays inside [0, 1] and is honest at 0 % and 100 %. Other values get the normal
    interval; a single one tells nothing about its spread and gets (-inf, inf).

    Raises:
        ValueError: no values, or `confidence` outside (0, 1).
    """
    if not values:
        raise ValueError("values is empty: an interval needs at least one value")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence = {confidence} must lie between 0 and 1, such as 0.95")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    n = len(values)
    mean = fmean(values)
    if all(value in (0, 1) for value in values):
        scale = 1 + z * z / n
        centre = (mean + z * z / (2 * n)) / scale
        half = z / scale * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        # At 0 and 1 the bounds are exactly 0 and 1; rounding must not say otherwise.
        return (0.0 if mean == 0 else centre - half), (1.0 if mean == 1 else centre + half)
    if n == 1:
        return -math.inf, math.inf
    half = z * stdev(values) / math.sqrt(n)
    return mean - half, mean + half


def score_text(score: float, interval: Sequence[float | None] | None = None) -> str:
    """A share in per cent with its interval: `49.0 % [43.4, 54.6]`."""
    text = f"{100 * score:.1f} %"
    bounds = [100 * bound for bound in interval or () if bound is not None and math.isfinite(bound)]
    return f"{text} [{bounds[0]:.1f}, {bounds[1]:.1f}]" if len(bounds) == 2 else text


@dataclass(frozen=True)
class Score:
    """A share of `n` questions, with its interval."""

    score: float
    interval: Interval
    n: int


def before_after(before: Score, after: Score) -> str:
    """`21.7 % [17.4, 26.7] → 49.0 % [43.4, 54.6], +27.3 points (300 questions, 95 % intervals)`."""
    questions = f"{after.n}" if before.n == after.n else f"{before.n} and {after.n}"
    return (
        f"{score_text(before.score, before.interval)} → {score_text(after.score, after.interval)}, "
        f"{100 * (after.score - before.score):+.1f} points "
        f"({questions} questions, {100 * CONFIDENCE:.0f} % intervals)"
    )


def duration_text(seconds: float) -> str:
    """`350ms`, `12.3s`, `8m21s`, `3h05m`, `2d04h`."""
    if seconds < 1:
        return f"{1000 * seconds:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h"


def bytes_text(count: float) -> str:
    """Binary units: `1.2GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f}{unit}"
        count /= 1024
    return f"{count:.1f}GiB"
