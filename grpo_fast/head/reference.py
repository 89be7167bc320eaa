"""The head in plain torch: chunked over rows and vocabulary, any device, any float dtype.

It runs where Triton does not, and in float64 it is the oracle of the tests. Logits are float32 (float64 for
float64 inputs) and exist one chunk at a time. The target's entry is kept out of every sum and added at the
end, so that log p = -log(1 + Σ_{v≠t} exp(z_v - z_t)) and 1 - p keep their digits when p is close to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.head.plan import Chunks
from grpo_fast.head.problem import HeadGradients, HeadProblem, Request, RowGradients, RowStatistics

_LOG_ZERO = -500.0
"""Stands in for log 0 where it is multiplied by a probability: exp of it is nothing, and it is finite."""


def forward(
    problem: HeadProblem, request: Request, chunks: Chunks, *, jacobian: bool = False
) -> tuple[RowStatistics, Tensor | None]:
    """Every row's statistics; and dlogprob/dhidden, (N, H), where asked for.

    With `jacobian` the same pass also forms dlogprob/dhidden = Σ_v (onehot - p)_v dz_v/dhidden, as flash
    attention forms its output. A head whose weight is frozen then needs two vocabulary-wide products in all,
    not three.
    """
    count = problem.hidden.shape[0]
    kind = {"dtype": problem.accumulator, "device": problem.hidden.device}

    def maybe(wanted: bool) -> Tensor:
        return torch.zeros(count if wanted else 0, **kind)

    statistics = RowStatistics(
        logprob=maybe(True),
        logsumexp=maybe(True),
        entropy=maybe(request.entropy),
        mean_logit=maybe(request.mean_logit),
        max_logit=maybe(request.max_logit),
        target_logit=maybe(request.max_logit),
        log_sum_sq=maybe(request.log_sum_sq),
    )
    pull = torch.zeros(problem.hidden.shape, **kind) if jacobian else None
    worked = (problem.targets >= 0).nonzero().squeeze(1)
    with _exact_bf16_products(problem):
        for index in worked.split(chunks.rows):
            _forward_rows(problem.rows(index), request, chunks.columns, index, statistics, pull)
    return statistics, pull


def backward(
    problem: HeadProblem,
    statistics: RowStatistics,
    gradients: RowGradients,
    chunks: Chunks,
    *,
    jacobian: Tensor | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    weight_gradient: Tensor | None = None,
) -> HeadGradients:
    """Exact gradients. Rows without upstream gradient cost nothing.

    Args:
        weight_gradient: (V, H) existing gradient, any float dtype: the weight's is added to it in place and
            returned as it.

    With the forward's `jacobian`, a gradient that flows through the log-probability alone into a frozen
    head's hidden states is one scaling of it; anything else recomputes the logits.
    """
    if jacobian is not None and gradients.only_logprob and not need_weight and not need_bias:
        upstream = torch.where(problem.targets >= 0, gradients.logprob, 0)
        return HeadGradients((jacobian * upstream[:, None]).to(problem.hidden.dtype), None, None)
    rows, index = LiveRows.of(problem, statistics, gradients)
    kind = {"dtype": problem.accumulator, "device": problem.hidden.device}
    hidden = torch.zeros(index.numel(), problem.hidden.shape[1], **kind) if need_hidden else None
    weight = weight_gradient
    if need_weight and weight is None:
        weight = torch.zeros_like(problem.weight)
    bias = torch.empty_like(problem.bias) if need_bias else None
    with _exact_bf16_products(problem):
        for start in range(0, problem.vocabulary, chunks.columns):
            columns = slice(start, min(start + chunks.columns, problem.vocabulary))
            _backward_columns(rows, columns, chunks.rows, hidden, weight if need_weight else None, bias)
    if hidden is not None:
        scattered = torch.zeros_like(problem.hidden, memory_format=torch.contiguous_format)
        hidden = scattered.index_copy_(0, index, hidden.to(problem.hidden.dtype))
    return HeadGradients(hidden, weight if need_weight else None, bias)


def add_into(existing: Tensor | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """`existing` after adding to it in place, rounded once; the gradient in `dtype` where nothing exists."""
    return gradient.to(dtype) if existing is None else existing.add_(gradient)


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


def _slope(problem: HeadProblem, z: Tensor) -> Tensor:
    """dz/d(x·w), broadcastable to z."""
    slope = torch.full((), problem.logit_scale, dtype=z.dtype, device=z.device)
    if problem.inv_temperature is not None:
        inv_temperature = problem.inv_temperature.to(z.dtype)[:, None]
        slope = slope * inv_temperature
    if problem.softcap is not None:
        cap = problem.softcap if problem.inv_temperature is None else problem.softcap * inv_temperature
        slope = slope * (1 - (z / cap).square())
    return slope


@dataclass
class _Running:
    """Online-softmax state of n rows, relative to the running maximum, without the target's entry."""

    maximum: Tensor  # (n,) over every entry seen, the target's too
    others: Tensor  # (n,) Σ e, e = exp(z - maximum)
    target: Tensor  # (n,) the target's logit, -inf until seen
    weighted: Tensor | None  # (n,) Σ e (z - maximum)
    squares: Tensor | None  # (n,) Σ e²
    total: Tensor | None  # (n,) Σ z, with the target's
    pull: Tensor | None  # (n, H) Σ e dz/dhidden

    def rebase(self, maximum: Tensor) -> None:
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


def _forward_rows(
    block: HeadProblem,
    request: Request,
    width: int,
    index: Tensor,
    statistics: RowStatistics,
    jacobian: Tensor | None,
) -> None:
    """Runs one block of rows over the vocabulary and writes its results to `index` of the outputs."""
    count = block.hidden.shape[0]
    kind = {"dtype": block.accumulator, "device": block.hidden.device}
    zeros = torch.zeros(count, **kind)
    running = _Running(
        maximum=torch.full((count,), -torch.inf, **kind),
        others=zeros,
        target=torch.full((count,), -torch.inf, **kind),
        weighted=zeros if request.entropy else None,
        squares=zeros if request.log_sum_sq else None,
        total=zeros if request.mean_logit else None,
        pull=None if jacobian is None else torch.zeros(count, block.hidden.shape[1], **kind),
    )
    for start in range(0, block.vocabulary, width):
        _absorb(running, block, slice(start, min(start + width, block.vocabulary)))
    present = block.targets < block.vocabulary
    _finish_statistics(running, present, block.vocabulary, index, statistics)
    if jacobian is not None:
        jacobian[index] = _finish_jacobian(running, block, present)


def _absorb(running: _Running, block: HeadProblem, columns: slice) -> None:
    """Adds one chunk of the vocabulary to the running state."""
    z = logits(block, columns)
    slope = None if running.pull is None or block.softcap is None else _slope(block, z)
    if running.total is not None:
        running.total = running.total + z.sum(1)
    running.rebase(torch.maximum(running.maximum, z.amax(1)))
    row, column = _targets_within(block.targets, columns)
    running.target[row] = z[row, column]
    z[row, column] = -torch.inf
    z -= _finite_or_zero(running.maximum)[:, None]
    if running.weighted is None:
        e = z.exp_()
    else:
        e = z.exp()
        running.weighted = running.weighted + (e * z.clamp_min_(_LOG_ZERO)).sum(1)
    running.others = running.others + e.sum(1)
    if running.squares is not None:
        running.squares = running.squares + e.square().sum(1)
    if running.pull is not None:
        if slope is not None:
            e *= slope
        running.pull.addmm_(e, block.weight[columns].to(e.dtype))


def _finish_statistics(
    running: _Running, present: Tensor, vocabulary: int, index: Tensor, out: RowStatistics
) -> None:
    base = _finite_or_zero(running.maximum)
    relative = running.target - base
    e = torch.where(present, relative.exp(), torch.zeros_like(relative))
    total = running.others + e
    out.logsumexp[index] = torch.where(running.maximum.isneginf(), running.maximum, base + total.log())
    margin = running.others.log() - relative
    logprob = -torch.logaddexp(margin, torch.zeros_like(margin))
    out.logprob[index] = torch.where(present, logprob, torch.zeros_like(logprob))
    if running.weighted is not None:
        weighted = running.weighted + e * relative.clamp_min(_LOG_ZERO)
        out.entropy[index] = total.log() - weighted / total
    if running.squares is not None:
        out.log_sum_sq[index] = (running.squares + e.square()).log() - 2 * total.log()
    if running.total is not None:
        out.mean_logit[index] = running.total / vocabulary
    if out.max_logit.numel():
        out.max_logit[index] = running.maximum
        out.target_logit[index] = torch.where(present, running.target, torch.zeros_like(running.target))


def _finish_jacobian(running: _Running, block: HeadProblem, present: Tensor) -> Tensor:
    """(1 - p_t) dz_t/dhidden - Σ_{v≠t} p_v dz_v/dhidden; zero without a target of this weight."""
    e = (running.target - _finite_or_zero(running.maximum)).exp()
    total = running.others + e
    row_slope = _slope(block, running.target[:, None])
    rows = block.weight[block.targets.clamp(max=block.vocabulary - 1)].to(e.dtype)
    pull = running.pull / total[:, None]
    if block.softcap is None:
        pull = pull * row_slope
    jacobian = (running.others / total)[:, None] * row_slope * rows - pull
    return torch.where(present[:, None], jacobian, torch.zeros_like(jacobian))


@dataclass(frozen=True)
class LiveRows:
    """The rows with upstream gradient, and what their logit gradient is made of. n rows."""

    problem: HeadProblem
    logsumexp: Tensor  # (n,)
    mass: Tensor  # (n,) factor of p: g_lse - g_logprob
    target: Tensor  # (n,) the target's whole entry without its entropy and mean parts
    entropy: Tensor | None  # (n,)
    entropy_gradient: Tensor | None  # (n,)
    mean_gradient: Tensor | None  # (n,) per vocabulary entry

    @classmethod
    def of(
        cls, problem: HeadProblem, statistics: RowStatistics, gradients: RowGradients
    ) -> tuple[LiveRows, Tensor]:
        """The rows with work and an upstream gradient, and their places, (n,) int64."""
        live = gradients.live_rows()
        if live is None:
            live = torch.zeros_like(problem.targets, dtype=torch.bool)
        index = (live & (problem.targets >= 0)).nonzero().squeeze(1)
        return cls.gather(problem, statistics, gradients, index), index

    @classmethod
    def gather(
        cls, problem: HeadProblem, statistics: RowStatistics, gradients: RowGradients, index: Tensor
    ) -> LiveRows:
        """The rows at `index`, (n,) int64, whether or not they have a gradient."""
        chosen = gradients.rows(index)
        block = problem.rows(index)
        logprob = statistics.logprob[index]
        zero = torch.zeros_like(logprob)
        present = block.targets < block.vocabulary
        of_logprob = zero if chosen.logprob is None else torch.where(present, chosen.logprob, zero)
        of_logsumexp = zero if chosen.logsumexp is None else chosen.logsumexp
        return cls(
            problem=block,
            logsumexp=statistics.logsumexp[index],
            mass=of_logsumexp - of_logprob,
            target=of_logprob * -logprob.expm1() + of_logsumexp * logprob.exp(),
            entropy=None if chosen.entropy is None else statistics.entropy[index],
            entropy_gradient=chosen.entropy,
            mean_gradient=None if chosen.mean_logit is None else chosen.mean_logit / problem.vocabulary,
        )

    def rows(self, part: slice) -> LiveRows:
        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[part]

        return LiveRows(
            self.problem.rows(part),
            self.logsumexp[part],
            self.mass[part],
            self.target[part],
            cut(self.entropy),
            cut(self.entropy_gradient),
            cut(self.mean_gradient),
        )

    def product_gradient(self, columns: slice) -> Tensor:
        """dL/d(x·w + bias), (n, columns)."""
        z = logits(self.problem, columns)
        slope = _slope(self.problem, z)
        z -= self.logsumexp[:, None]
        row, column = _targets_within(self.problem.targets, columns)
        if self.entropy_gradient is None:
            gradient = z.exp_().mul_(self.mass[:, None])
            gradient[row, column] = self.target[row]
        else:
            surprise = self.entropy_gradient[:, None] * (z.clamp_min(_LOG_ZERO) + self.entropy[:, None])
            p = z.exp_()
            at_target = self.target[row] - p[row, column] * surprise[row, column]
            gradient = p * (self.mass[:, None] - surprise)
            gradient[row, column] = at_target
        if self.mean_gradient is not None:
            gradient += self.mean_gradient[:, None]
        return gradient if self.problem.is_plain else gradient.mul_(slope)


def _backward_columns(
    live: LiveRows,
    columns: slice,
    height: int,
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Adds the columns' part to `hidden` and their own rows of `weight`, and writes those of `bias`."""
    problem = live.problem
    kind = problem.accumulator
    width = columns.stop - columns.start
    device = problem.hidden.device
    weight_part = (
        None if weight is None else torch.zeros(width, problem.hidden.shape[1], dtype=kind, device=device)
    )
    bias_part = None if bias is None else torch.zeros(width, dtype=kind, device=device)
    for start in range(0, problem.hidden.shape[0], height):
        part = slice(start, min(start + height, problem.hidden.shape[0]))
        gradient = live.rows(part).product_gradient(columns)
        if hidden is not None:
            hidden[part].addmm_(gradient, problem.weight[columns].to(kind))
        if weight_part is not None:
            weight_part.addmm_(gradient.t(), problem.hidden[part].to(kind))
        if bias_part is not None:
            bias_part += gradient.sum(0)
    if weight_part is not None:
        weight[columns] += weight_part
    if bias_part is not None:
        bias[columns] = bias_part.to(bias.dtype)


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
    matmul = torch.backends.mkldnn.matmul
    if problem.hidden.device.type != "cpu" or problem.hidden.dtype != torch.bfloat16:
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
