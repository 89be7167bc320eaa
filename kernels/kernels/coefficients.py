"""What makes a row's logit gradient, from the upstream gradients of its log-probability and log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from .policy_terms import expm1

if TYPE_CHECKING:
    from grpo_fast.head.problem import HeadProblem, RowGradients, RowStatistics


@dataclass(frozen=True)
class RowCoefficients:
    """What makes the logit gradients of N rows: g·onehot(target) − c·p, before the slope of the logit."""

    logsumexp: Tensor  # (N,) float32, as the next three
    target: Tensor  # dL/dz of the target
    mass: Tensor  # c; dL/dz is −c·p elsewhere
    scale: Tensor  # largest |dL/d(x·w)| per probability: |c| times the steepest slope of the logit
    squares: Tensor  # (P,) float32, their sum: Σ_i (Σ_v|G_iv|)²


def row_coefficients(
    problem: HeadProblem, statistics: RowStatistics, gradients: RowGradients
) -> RowCoefficients:
    """Of upstream gradients of the log-probability and the log-sum-exp.

    Gradients of the entropy or the mean logit are not sparse in the probability: they go to the dense path.
    """
    rows = problem.targets.numel()
    programs = triton.cdiv(rows, _ROWS)
    upstream = (None if g is None else g.contiguous() for g in gradients[:2])  # autograd expands
    target, mass, scale = (statistics.logprob.new_empty(rows) for _ in range(3))
    squares = statistics.logprob.new_empty(programs)
    if rows:
        _row_coefficients[(programs,)](
            problem.targets, statistics.logprob, *upstream, problem.inv_temperature,
            float(problem.logit_scale), target, mass, scale, squares, rows, problem.vocabulary, BLOCK=_ROWS,
        )  # fmt: skip
    return RowCoefficients(statistics.logsumexp, target, mass, scale, squares)


_ROWS = 1024


@triton.jit(do_not_specialize=["logit_scale", "rows", "vocabulary"])
def _row_coefficients(
    targets,  # (N,) int64
    logprob,  # (N,) float32
    of_logprob,  # (N,) float32 or None, as the next: upstream gradients
    of_logsumexp,
    inv_temperature,  # (N,) float32 or None
    logit_scale,
    target_out,  # (N,) float32, written, as the next two
    mass_out,
    scale_out,
    squares,  # (programs,) float32, written
    rows,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    target = tl.load(targets + row, mask=inside, other=-1)
    works = target >= 0  # a row without work may hold NaN
    logp = tl.load(logprob + row, mask=works, other=0.0)
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    of_target = tl.zeros((BLOCK,), dtype=tl.float32)
    rest = -expm1(logp)  # near p = 1, 1 − p is rounding noise
    if of_logprob is not None:
        g = tl.load(of_logprob + row, mask=works & (target < vocabulary), other=0.0)
        mass += g
        of_target += g * rest
    if of_logsumexp is not None:
        g = tl.load(of_logsumexp + row, mask=works, other=0.0)
        mass -= g
        of_target += tl.where(g == 0.0, 0.0, g * tl.exp(logp))
    scale = tl.abs(mass) * tl.abs(logit_scale)
    if inv_temperature is not None:
        scale *= tl.load(inv_temperature + row, mask=works, other=0.0)
    tl.store(target_out + row, of_target, mask=inside)
    tl.store(mass_out + row, mass, mask=inside)
    tl.store(scale_out + row, scale, mask=inside)
    # A row's entries beside the target's sum to |c|·(1 − p). A row of NaN is not counted.
    norm = tl.abs(of_target) + tl.abs(mass) * rest
    tl.store(squares + tl.program_id(0), tl.sum(tl.where(norm == norm, norm * norm, 0.0)))
