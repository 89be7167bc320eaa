"""The head in plain torch: chunked over rows and vocabulary, any device, any float dtype.

It runs where Triton does not, and in float64 it is the oracle of the tests. Logits are float32 (float64 for
float64 inputs) and exist one chunk at a time. The target's entry is kept out of every sum and added at the
end, so that log p = -log(1 + Σ_{v≠t} exp(z_v - z_t)) and 1 - p keep their digits when p is close to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from grpo_fast.head.plan import Chunks
from grpo_fast.head.problem import (
    LOG_ZERO,
    HeadGradients,
    HeadProblem,
    LogitGradient,
    Request,
    RowGradients,
    RowStatistics,
    State,
    Wanted,
)


def forward(problem: HeadProblem, request: Request, chunks: Chunks) -> tuple[RowStatistics, State]:
    """Every row's statistics, and the state with dlogprob/dhidden where the request has `jacobian`.

    The same pass forms dlogprob/dhidden = Σ_v (onehot - p)_v dz_v/dhidden, as flash attention forms its
    output. A head whose weight is frozen then needs two vocabulary-wide products in all, not three.
    """
    statistics, state = RowStatistics.allocate(problem, request), State.empty(problem)
    if request.jacobian:
        state = state._replace(
            jacobian=problem.hidden.new_zeros(problem.hidden.shape, dtype=problem.accumulator)
        )
    worked = (problem.targets >= 0).nonzero().squeeze(1)
    with _exact_bf16_products(problem):
        for index in worked.split(chunks.rows):
            softmax = _OnlineSoftmax(problem.rows(index), request)
            for columns in _ranges(problem.vocabulary, chunks.columns):
                softmax.absorb(columns)
            softmax.write(index, statistics)
            if request.jacobian:
                state.jacobian[index] = softmax.jacobian()
    return statistics, state


def backward(
    problem: HeadProblem,
    statistics: RowStatistics,
    gradients: RowGradients,
    wanted: Wanted,
    state: State,
    chunks: Chunks,
) -> HeadGradients:
    """Exact gradients. Rows without upstream gradient cost nothing.

    With the forward's `jacobian`, a gradient that flows through the log-probability alone into a frozen
    head's hidden states is one scaling of it; anything else recomputes the logits.
    """
    logprob, *others = gradients
    frozen = not (wanted.weight or wanted.bias)
    if state.jacobian.numel() and frozen and logprob is not None and all(g is None for g in others):
        upstream = torch.where(problem.targets >= 0, logprob, 0)
        return HeadGradients((state.jacobian * upstream[:, None]).to(problem.hidden.dtype), None, None)
    rows = LogitGradient.of(problem, statistics, gradients)
    index = rows.live().nonzero().squeeze(1)
    live, rows = problem.rows(index), rows.rows(index)
    hidden = torch.zeros_like(live.hidden, dtype=problem.accumulator) if wanted.hidden else None
    weight, bias = wanted.into_weight, None
    if wanted.weight and weight is None:
        weight = torch.zeros_like(problem.weight)
    if wanted.bias and problem.bias is not None:
        bias = torch.zeros_like(problem.bias)
    with _exact_bf16_products(problem):
        for columns in _ranges(problem.vocabulary, chunks.columns):
            of_weight, of_bias = (None if t is None else t[columns] for t in (weight, bias))
            _backward_columns(live, rows, columns, chunks.rows, hidden, of_weight, of_bias)
    if hidden is not None:
        hidden = scattered(hidden, index, problem.hidden)
    return HeadGradients(hidden, weight, bias)


def scattered(rows: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """The rows at their places, in the dtype of `like`; zero elsewhere."""
    everywhere = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return everywhere.index_copy_(0, index, rows.to(like.dtype))


def logits(problem: HeadProblem, columns: slice) -> Tensor:
    """Transformed logits of some columns, (N, columns) in the accumulator's dtype."""
    kind = problem.accumulator
    z = problem.hidden.to(kind) @ problem.weight[columns].to(kind).t()
    if problem.bias is not None:
        z += problem.bias[columns].to(kind)
    if problem.softcap is not None:
        z.mul_(problem.logit_scale / problem.softcap).tanh_().mul_(problem.softcap)
    elif problem.logit_scale != 1.0:
        z *= problem.logit_scale
    if problem.inv_temperature is not None:
        z *= problem.inv_temperature.to(kind)[:, None]
    return z


def product_gradient(problem: HeadProblem, rows: LogitGradient, columns: slice) -> Tensor:
    """dL/d(x·w + bias) of some columns, (N, columns)."""
    z = logits(problem, columns)
    slope = _slope(problem, z)
    z -= rows.logsumexp[:, None]
    if rows.entropy is None or rows.entropy_gradient is None:
        gradient = z.exp_().mul_(rows.mass[:, None])
    else:
        surprise = rows.entropy_gradient[:, None] * (z.clamp_min(LOG_ZERO) + rows.entropy[:, None])
        gradient = z.exp_() * (rows.mass[:, None] - surprise)
    row, column = _targets_within(problem.targets, columns)
    gradient[row, column] = rows.target[row]
    if rows.mean is not None:
        gradient += rows.mean[:, None]
    return gradient if problem.is_plain else gradient.mul_(slope)


def _slope(problem: HeadProblem, z: Tensor) -> Tensor:
    """dz/d(x·w), broadcastable to z."""
    slope = torch.full((), problem.logit_scale, dtype=z.dtype, device=z.device)
    cap: float | Tensor | None = problem.softcap
    if problem.inv_temperature is not None:
        inv_temperature = problem.inv_temperature.to(z.dtype)[:, None]
        slope = slope * inv_temperature
        cap = None if cap is None else cap * inv_temperature
    return slope if cap is None else slope * (1 - (z / cap).square())


class _OnlineSoftmax:
    """What n rows have seen of the vocabulary, relative to the largest logit, without the target's entry."""

    def __init__(self, block: HeadProblem, request: Request) -> None:
        self.block = block
        rows = block.targets
        zeros = torch.zeros_like(rows, dtype=block.accumulator)
        self.maximum = torch.full_like(zeros, -torch.inf)  # (n,) over every entry seen, the target's too
        self.others = zeros  # (n,) Σ e, e = exp(z - maximum)
        self.target = torch.full_like(zeros, -torch.inf)  # (n,) the target's logit, -inf until seen
        self.weighted = zeros if request.entropy else None  # (n,) Σ e (z - maximum)
        self.squares = zeros if request.log_sum_sq else None  # (n,) Σ e²
        self.total = zeros if request.mean_logit else None  # (n,) Σ z, with the target's
        # (n, H) Σ e dz/dhidden
        self.pull = torch.zeros_like(block.hidden, dtype=block.accumulator) if request.jacobian else None

    def absorb(self, columns: slice) -> None:
        """Adds one chunk of the vocabulary."""
        z = logits(self.block, columns)
        slope = _slope(self.block, z) if self.pull is not None and self.block.softcap is not None else None
        if self.total is not None:
            self.total = self.total + z.sum(1)
        self._rebase(torch.maximum(self.maximum, z.amax(1)))
        row, column = _targets_within(self.block.targets, columns)
        self.target[row] = z[row, column]
        z[row, column] = -torch.inf
        z -= _finite_or_zero(self.maximum)[:, None]
        if self.weighted is None:
            e = z.exp_()
        else:
            e = z.exp()
            self.weighted = self.weighted + (e * z.clamp_min_(LOG_ZERO)).sum(1)
        self.others = self.others + e.sum(1)
        if self.squares is not None:
            self.squares = self.squares + e.square().sum(1)
        if self.pull is not None:
            if slope is not None:
                e *= slope
            self.pull.addmm_(e, self.block.weight[columns].to(e.dtype))

    def _rebase(self, maximum: Tensor) -> None:
        """Makes a new maximum the reference of all sums."""
        shift = _finite_or_zero(self.maximum) - _finite_or_zero(maximum)
        factor = torch.where(self.maximum.isneginf(), torch.zeros_like(shift), shift.exp())
        if self.weighted is not None:
            self.weighted = factor * (self.weighted + self.others * shift)
        if self.squares is not None:
            self.squares = self.squares * factor.square()
        if self.pull is not None:
            self.pull *= factor[:, None]
        self.others = self.others * factor
        self.maximum = maximum

    @property
    def present(self) -> Tensor:
        """(n,) bool: rows whose target is in this weight."""
        return self.block.targets < self.block.vocabulary

    def write(self, index: Tensor, out: RowStatistics) -> None:
        """Writes the statistics of all rows to `index` of the outputs."""
        base = _finite_or_zero(self.maximum)
        relative = self.target - base
        e = torch.where(self.present, relative.exp(), 0)
        total = self.others + e
        out.logsumexp[index] = torch.where(self.maximum.isneginf(), self.maximum, base + total.log())
        margin = self.others.log() - relative
        logprob = -torch.logaddexp(margin, torch.zeros_like(margin))
        out.logprob[index] = torch.where(self.present, logprob, 0)
        if self.weighted is not None:
            weighted = self.weighted + e * relative.clamp_min(LOG_ZERO)
            out.entropy[index] = total.log() - weighted / total
        if self.squares is not None:
            out.log_sum_sq[index] = (self.squares + e.square()).log() - 2 * total.log()
        if self.total is not None:
            out.mean_logit[index] = self.total / self.block.vocabulary
        if out.max_logit.numel():
            out.max_logit[index] = self.maximum
            out.target_logit[index] = torch.where(self.present, self.target, 0)

    def jacobian(self) -> Tensor:
        """(1 - p_t) dz_t/dhidden - Σ_{v≠t} p_v dz_v/dhidden; zero without a target of this weight."""
        assert self.pull is not None, "the request had no jacobian"
        block = self.block
        e = (self.target - _finite_or_zero(self.maximum)).exp()
        total = self.others + e
        row_slope = _slope(block, self.target[:, None])
        of_target = block.weight[block.targets.clamp(max=block.vocabulary - 1)].to(e.dtype)
        pull = self.pull / total[:, None]
        if block.softcap is None:
            pull = pull * row_slope
        jacobian = (self.others / total)[:, None] * row_slope * of_target - pull
        return torch.where(self.present[:, None], jacobian, 0)


def _backward_columns(
    problem: HeadProblem,
    rows: LogitGradient,
    columns: slice,
    height: int,
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Adds the columns' part to `hidden`, and to `weight` and `bias`, which are those columns' own."""
    width, depth = columns.stop - columns.start, problem.hidden.shape[1]
    kind = problem.accumulator
    new = problem.hidden.new_zeros
    of_weight = None if weight is None else new(width, depth, dtype=kind)
    of_bias = None if bias is None else new(width, dtype=kind)
    for part in _ranges(problem.hidden.shape[0], height):
        block = problem.rows(part)
        gradient = product_gradient(block, rows.rows(part), columns)
        if hidden is not None:
            hidden[part].addmm_(gradient, problem.weight[columns].to(kind))
        if of_weight is not None:
            of_weight.addmm_(gradient.t(), block.hidden.to(kind))
        if of_bias is not None:
            of_bias += gradient.sum(0)
    for total, part_of_it in ((weight, of_weight), (bias, of_bias)):
        if total is not None and part_of_it is not None:
            total += part_of_it


def _ranges(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _targets_within(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Row and column, inside the chunk, of each target that lies in it."""
    row = ((targets >= columns.start) & (targets < columns.stop)).nonzero().squeeze(1)
    return row, targets[row] - columns.start


def _finite_or_zero(maximum: Tensor) -> Tensor:
    """A maximum that may be subtracted: -inf - -inf would not be a number."""
    return torch.where(maximum.isneginf(), torch.zeros_like(maximum), maximum)


@contextmanager
def _exact_bf16_products(problem: HeadProblem) -> Iterator[None]:
    """Lets oneDNN multiply bfloat16 values held in float32 at bfloat16 speed, with a float32 result.

    A bfloat16 matmul would round its output, the logits, to bfloat16. Here the operands of the logit product
    are bfloat16 numbers already, so nothing is lost; the logit gradient is rounded, as it is for the GPU's
    tensor cores.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch sets it as it is imported
    if problem.hidden.device.type != "cpu" or problem.hidden.dtype != torch.bfloat16:
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
