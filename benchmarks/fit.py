"""How a measurement grows: the exponent of a power law, by least squares on logarithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, for 1 to 10 degrees of freedom."""
_T_95_BEYOND = 2.2


@dataclass(frozen=True)
class PowerLaw:
    """y ≈ factor · x^exponent, and the 95 % interval of the exponent."""

    exponent: float
    lower: float
    upper: float
    factor: float
    points: int


def fit_power_law(xs: Sequence[float], ys: Sequence[float]) -> PowerLaw | None:
    """None where there are fewer than three different sizes, or a value that has no logarithm.

    The interval supposes that the logarithms scatter normally about one line; a curve bends it, and shows as
    a wide one.
    """
    if len(set(xs)) < 3 or min(*xs, *ys) <= 0:
        return None
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    count = len(u)
    mean_u, mean_v = sum(u) / count, sum(v) / count
    spread = sum((a - mean_u) ** 2 for a in u)
    exponent = sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True)) / spread
    intercept = mean_v - exponent * mean_u
    residual = sum((b - intercept - exponent * a) ** 2 for a, b in zip(u, v, strict=True))
    freedom = count - 2
    t = _T_95[freedom - 1] if freedom <= len(_T_95) else _T_95_BEYOND
    half = t * math.sqrt(residual / freedom / spread)
    return PowerLaw(exponent, exponent - half, exponent + half, math.exp(intercept), count)
