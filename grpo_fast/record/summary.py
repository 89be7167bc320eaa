"""Format scores, intervals, durations, bytes and excerpts, and describe the metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from statistics import NormalDist, fmean, stdev
from typing import Any

import yaml
from pydantic import BaseModel, ByteSize

from grpo_fast.config.section import plural

CONFIDENCE = 0.95

Interval = tuple[float, float]  # (low, high)


class Metric(BaseModel):
    """A metric or timing; metrics.yaml explains the fields."""

    name: str
    meaning: str
    title: str = ""
    word: str = ""
    unit: str = ".3g"

    def text(self, value: float) -> str:
        if not math.isfinite(value):
            return str(value)
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        special = {"s": duration_text, "bytes": bytes_text}.get(self.unit)
        return special(value) if special else format(value, self.unit)


_TABLE = files("grpo_fast.record").joinpath("metrics.yaml").read_text(encoding="utf-8")
METRICS = {name: Metric(name=name, **fields) for name, fields in yaml.safe_load(_TABLE).items()}
"""Every name in metrics.jsonl and timings.jsonl; NAME stands for any text."""

FIGURES = tuple(metric for metric in METRICS.values() if metric.title)
"""Metrics in the report and in a step's line, the most useful first."""


def metric_of(name: str) -> Metric | None:
    """Return the metric of a name in a file."""
    if name in METRICS:
        return METRICS[name]
    patterns = ((re.escape(known).replace("NAME", ".+"), known) for known in METRICS if "NAME" in known)
    return next((METRICS[known] for pattern, known in patterns if re.fullmatch(pattern, name)), None)


def mean_interval(values: Sequence[float]) -> Interval:
    """Compute the 95 % confidence interval (low, high) of the mean of independent values.

    Values that are all 0 or 1 are a proportion and get the score interval of Wilson (1927, JASA 22, p. 209).
    Other values get the normal interval; a single value gets (-inf, inf).
    """
    if not values:
        raise ValueError("values is empty: an interval needs at least one value")
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    n = len(values)
    mean = fmean(values)
    if all(value in (0, 1) for value in values):
        scale = 1 + z * z / n
        center = (mean + z * z / (2 * n)) / scale
        half = z / scale * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        # Without rounding the bounds are exactly 0 and 1 at means of 0 and 1.
        return (0.0 if mean == 0 else center - half), (1.0 if mean == 1 else center + half)
    if n == 1:
        return -math.inf, math.inf
    half = z * stdev(values) / math.sqrt(n)
    return mean - half, mean + half


def score_text(score: float, interval: Sequence[float | None] | None = None) -> str:
    """Format a share as a percentage with its interval: `49.0 % [43.4, 54.6]`."""
    text = f"{100 * score:.1f} %"
    bounds = [100 * bound for bound in interval or () if bound is not None and math.isfinite(bound)]
    return f"{text} [{bounds[0]:.1f}, {bounds[1]:.1f}]" if len(bounds) == 2 else text


def before_after(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Format two evaluations: `21.7 % [17.4, 26.7] → 49.0 % [43.4, 54.6], +27.3 points (…)`."""
    questions = f"{before['n']} and " * (before["n"] != after["n"]) + plural(after["n"], "question")
    scores = " → ".join(score_text(one["score"], one["interval"]) for one in (before, after))
    gain = f"{100 * (after['score'] - before['score']):+.1f} points"
    bounds = (*before["interval"], *after["interval"])
    if all(bound is not None and math.isfinite(bound) for bound in bounds):
        # Half the interval of the difference of two independent scores.
        margin = math.hypot((bounds[1] - bounds[0]) / 2, (bounds[3] - bounds[2]) / 2)
        if margin and margin >= abs(after["score"] - before["score"]):
            gain += f", no clear difference (its interval is ±{100 * margin:.1f})"
    return f"{scores}, {gain} ({questions}, {100 * CONFIDENCE:.0f} % intervals)"


def duration_text(seconds: float) -> str:
    """Format seconds: `350ms`, `12.3s`, `8m21s`, `3h05m`, `2d04h`."""
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
    """Format bytes: `1.5 GiB`, `12.0 MiB`, `512 B`."""
    return ByteSize(count).human_readable(separator=" ")


def excerpt(text: str, most: int) -> str:
    """Shorten a text to `most` characters: three quarters from its start, a quarter from its end."""
    if len(text) <= most:
        return text
    left_out = f"\n\n[… {len(text) - most:,} characters left out; samples.jsonl has them …]\n\n"
    return text[: most - most // 4] + left_out + text[-(most // 4) :]
