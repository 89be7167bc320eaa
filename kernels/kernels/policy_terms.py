"""The terms of a policy loss and their slopes in the log-probability, per token in float32.

`grpo_fast.objective` names the paper of every formula.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp_beyond_linear(x):
    """Compute exp(x) − 1 − x, by its series where the difference would cancel."""
    series = 1.0 / 3628800
    series = series * x + 1.0 / 362880
    series = series * x + 1.0 / 40320
    series = series * x + 1.0 / 5040
    series = series * x + 1.0 / 720
    series = series * x + 1.0 / 120
    series = series * x + 1.0 / 24
    series = series * x + 1.0 / 6
    series = series * x + 0.5
    return tl.where(tl.abs(x) < 0.5, series * x * x, tl.exp(x) - 1.0 - x)


@triton.jit
def expm1(x):
    return exp_beyond_linear(x) + x


@triton.jit
def xlogy(x, y):
    return tl.where(x == 0.0, 0.0, x * tl.log(y))


@triton.jit
def at_most(x, bound):
    """Compute min(x, bound); NaN passes through."""
    return tl.where(x > bound, bound, x)


@triton.jit
def surrogate_term(logprob, old, log_ratio, advantage, low, high, cap, SURROGATE: tl.constexpr):
    """Return the policy term, its slope, the ratio, and where the term was clipped: low, high, delta."""
    positive, negative = advantage > 0, advantage < 0
    never = positive & negative
    ratio = tl.exp(log_ratio)
    is_low, is_high, is_delta = never, never, never
    if SURROGATE == "clip":
        floor = tl.where(negative, low, float("-inf"))
        ceiling = tl.where(negative, cap, high)
        below, above = log_ratio < floor, log_ratio > ceiling
        bounded = tl.where(below, floor, tl.where(above, ceiling, log_ratio))
        term = -tl.exp(bounded) * advantage
        slope = tl.where(below | above, 0.0, term)
        is_low, is_high = (log_ratio < low) & negative, (log_ratio > high) & positive
        is_delta = (log_ratio > cap) & negative
    elif SURROGATE == "sapo":
        temperature = tl.where(positive, high, low)
        ratio = tl.exp(at_most(log_ratio, 40.0))
        gate = tl.sigmoid(temperature * (ratio - 1.0))
        term = -gate * 4.0 / temperature * advantage
        slope = tl.where(log_ratio > 40.0, 0.0, -4.0 * gate * (1.0 - gate) * ratio * advantage)
    elif SURROGATE == "dro":
        term = 0.5 * cap * log_ratio * log_ratio - advantage * logprob
        slope = cap * log_ratio - advantage
    else:
        if SURROGATE == "reinforce":
            weight = tl.full(logprob.shape, 1.0, tl.float32)
        elif SURROGATE == "cispo":
            weight = at_most(ratio, high)
            is_high = (ratio > high) & positive
        else:
            if SURROGATE == "dppo_tv":
                direction = expm1(logprob) - expm1(old)
                divergence = tl.abs(direction)
            else:
                rest, old_rest = -expm1(logprob), -expm1(old)
                direction = logprob - old
                divergence = xlogy(old_rest, old_rest) - xlogy(old_rest, rest) - tl.exp(old) * direction
            is_high = positive & (direction > 0) & (divergence > high)
            is_low = (advantage <= 0) & (direction < 0) & (divergence > low)
            weight = tl.where(is_high | is_low, 0.0, at_most(ratio, cap))
        slope = -weight * advantage
        term = slope * logprob
    return term, slope, ratio, is_low, is_high, is_delta


@triton.jit
def kl_term(difference, KL: tl.constexpr):
    """Return the estimate and its slope; difference = log π_θ − log π_ref."""
    if KL == "k1":
        return difference, tl.full(difference.shape, 1.0, tl.float32)
    elif KL == "k2":
        return 0.5 * difference * difference, difference
    else:
        bounded = at_most(-difference, 20.0)
        return exp_beyond_linear(bounded), tl.where(-difference > 20.0, 0.0, -expm1(bounded))
