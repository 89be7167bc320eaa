"""The head in plain torch: chunked over rows and vocabulary, any device, any float dtype.

It runs without Triton. Logits are float32 (float64 for float64 inputs) and exist one chunk at a time. The
target's entry is left out of every sum and added last, so that log p = -log(1 + Σ_{v≠t} exp(z_v - z_t)) and
1 - p keep their digits when p is close to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from grpo_fast.head.call import (
    LOG_ZERO,
    HeadCall,
    HeadGradients,
    LogitGradient,
    RowGradients,
    RowStatistics,
    Saved,
    Wanted,
)
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import Chunks


def forward(call: HeadCall, chunks: Chunks) -> tuple[RowStatistics, Saved]:
    """Compute every row's statistics, and dlogprob/dhidden if `call.jacobian`.

    The same pass computes dlogprob/dhidden = Σ_v (onehot - p)_v dz_v/dhidden, as flash attention computes its
    output. A frozen head then needs two vocabulary-wide products, not three.
    """
    statistics = RowStatistics.allocate(call)
    saved = Saved.empty(call, jacobian=call.jacobian)
    worked = (call.targets >= 0).nonzero().squeeze(1)
    with exact_bf16_products(call):
        for index in worked.split(chunks.rows):
            softmax = _OnlineSoftmax(call.rows(index))
            for columns in chunks.of_columns(call.vocabulary):
                softmax.absorb(columns)
            softmax.write(index, statistics)
            if call.jacobian:
                saved.jacobian[index] = softmax.jacobian()
    return statistics, saved


def backward(
    call: HeadCall,
    statistics: RowStatistics,
    gradients: RowGradients,
    wanted: Wanted,
    certificate: Certificate,
    chunks: Chunks,
) -> HeadGradients:
    """Compute exact gradients, and fill the certificate. Rows without a gradient cost nothing."""
    certificate.fill_exact()
    rows, kind = LogitGradient.of(call, statistics, gradients), call.accumulator
    index = rows.live().nonzero().squeeze(1)
    live, rows = call.rows(index), rows.rows(index)
    hidden = torch.zeros_like(live.hidden, dtype=kind) if wanted.hidden else None
    weight = bias = None
    if wanted.weight:
        weight = torch.zeros_like(call.weight) if wanted.into_weight is None else wanted.into_weight
    if wanted.bias and call.bias is not None:
        bias = torch.zeros_like(call.bias)
    parameters = [total for total in (weight, bias) if total is not None]
    with exact_bf16_products(call):
        for columns in chunks.of_columns(call.vocabulary):
            sums = [torch.zeros_like(total[columns], dtype=kind) for total in parameters]
            for part in chunks.of_rows(index.numel()):
                block = live.rows(part)
                gradient = rows.rows(part).of_products(block, columns)
                if hidden is not None:
                    hidden[part].addmm_(gradient, call.weight[columns].to(kind))
                if weight is not None:
                    sums[0].addmm_(gradient.t(), block.hidden.to(kind))
                if bias is not None:
                    sums[-1] += gradient.sum(0)
            for total, part_of_it in zip(parameters, sums, strict=True):
                total[columns] += part_of_it  # rounded once
    if hidden is not None:
        everywhere = torch.zeros_like(call.hidden, memory_format=torch.contiguous_format)
        hidden = everywhere.index_copy_(0, index, hidden.to(everywhere.dtype))
    return HeadGradients(hidden, weight, bias)


class _OnlineSoftmax:
    """Running sums of n rows over the vocabulary, relative to the largest logit, without the target."""

    def __init__(self, block: HeadCall) -> None:
        self.block = block
        rows = block.targets
        zeros = torch.zeros_like(rows, dtype=block.accumulator)
        self.maximum = torch.full_like(zeros, -torch.inf)  # (n,) over every entry seen, the target's too
        self.others = zeros  # (n,) Σ e, e = exp(z - maximum)
        self.target = torch.full_like(zeros, -torch.inf)  # (n,) the target's logit, -inf until seen
        self.weighted = zeros if block.entropy else None  # (n,) Σ e (z - maximum)
        self.squares = zeros if block.log_sum_sq else None  # (n,) Σ e²
        self.total = zeros if block.mean_logit else None  # (n,) Σ z, with the target's
        # (n, H) Σ e dz/dhidden
        self.pull = torch.zeros_like(block.hidden, dtype=block.accumulator) if block.jacobian else None

    def absorb(self, columns: slice) -> None:
        """Add one chunk of the vocabulary."""
        products = self.block.products(columns)
        capped = self.pull is not None and self.block.softcap is not None
        slope = self.block.slope(products) if capped else None
        z = self.block.transform_(products)
        if self.total is not None:
            self.total = self.total + z.sum(1)
        self._rebase(torch.maximum(self.maximum, z.amax(1)))
        row, column = self.block.targets_within(columns)
        self.target[row] = z[row, column]
        z[row, column] = -torch.inf
        z -= finite_or_zero(self.maximum)[:, None]
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
        """Make all sums relative to a new maximum."""
        shift = finite_or_zero(self.maximum) - finite_or_zero(maximum)
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
        """Write the statistics of all rows to `index` of the outputs."""
        base = finite_or_zero(self.maximum)
        relative = self.target - base
        e = torch.where(self.present, relative.exp(), 0)
        total = self.others + e
        out.logsumexp[index] = torch.where(self.maximum.isneginf(), self.maximum, base + total.log())
        margin = self.others.log() - relative
        logprob = -torch.logaddexp(margin, torch.zeros_like(margin))
        out.logprob[index] = torch.where(self.present, logprob, 0)
        if self.weighted is not None:
            own = torch.where(e > 0, e * logprob, 0)
            out.entropy[index] = (self.others * total.log() - self.weighted - own) / total
        if self.squares is not None:
            out.log_sum_sq[index] = (self.squares + e.square()).log() - 2 * total.log()
        if self.total is not None:
            out.mean_logit[index] = self.total / self.block.vocabulary
        if out.max_logit.numel():
            out.max_logit[index] = self.maximum
            out.target_logit[index] = torch.where(self.present, self.target, 0)

    def jacobian(self) -> Tensor:
        """Compute (1 - p_t) dz_t/dhidden - Σ_{v≠t} p_v dz_v/dhidden; zero without a target in this weight."""
        assert self.pull is not None, "the call had no jacobian"
        block = self.block
        e = (self.target - finite_or_zero(self.maximum)).exp()
        total = self.others + e
        target = block.targets.clamp(max=block.vocabulary - 1)
        of_target = block.weight[target].to(e.dtype)
        product = (block.hidden.to(e.dtype) * of_target).sum(1)
        row_slope = block.slope((product if block.bias is None else product + block.bias[target])[:, None])
        pull = self.pull / total[:, None]
        if block.softcap is None:
            pull = pull * row_slope
        jacobian = (self.others / total)[:, None] * row_slope * of_target - pull
        return torch.where(self.present[:, None], jacobian, 0)


def finite_or_zero(maximum: Tensor) -> Tensor:
    """Replace -inf by zero, so that -inf - maximum is not NaN."""
    return torch.where(maximum.isneginf(), torch.zeros_like(maximum), maximum)


@contextmanager
def exact_bf16_products(call: HeadCall) -> Iterator[None]:
    """Let oneDNN multiply bfloat16 values held in float32 at bfloat16 speed, with a float32 result.

    A bfloat16 matmul would round the logits to bfloat16. The operands of the logit product are bfloat16
    values already, so nothing is lost; the logit gradient is rounded, as for a GPU's tensor cores.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch sets it as it is imported
    if call.hidden.device.type != "cpu" or call.hidden.dtype != torch.bfloat16:
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
