"""Divergences of two heads in plain torch: a block of rows at a time, any device, any float dtype.

The logits of one block of rows exist, for both heads over the whole vocabulary: a gradient then costs one
more product and no second pair of logit products. With d = log p - log q, the Kullback-Leibler divergence is

    KL(p || q) = Σ p·(exp(-d) - 1 + d)

because p and q both sum to one. Every term is at least zero, and an error of a log-sum-exp enters in second
order only, where Σ p·d loses digits to cancellation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.head.call import LOG_ZERO, HeadCall, HeadGradients, KLCall, RowDivergence, Wanted
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import Chunks
from grpo_fast.head.reference import exact_bf16_products, finite_or_zero


def forward(call: KLCall, chunks: Chunks) -> tuple[RowDivergence, Tensor]:
    """Every row's divergence, and (N, H) ddivergence/dhidden where the call has `jacobian`, else (0,)."""
    rows = RowDivergence.allocate(call)
    jacobian = call.hidden.new_zeros(call.hidden.shape if call.jacobian else 0, dtype=call.accumulator)
    for index in call.mask.nonzero().squeeze(1).split(chunks.rows):
        block = _Block.of(call.rows(index), chunks)
        for name, found in block.results()._asdict().items():
            getattr(rows, name)[index] = found
        if call.jacobian:
            jacobian[index] = block.times_weight(block.logit_gradient(None, None))
    return rows, jacobian


def backward(
    call: KLCall,
    of_divergence: Tensor | None,
    of_logsumexp: Tensor | None,
    wanted: Wanted,
    certificate: Certificate,
    chunks: Chunks,
) -> HeadGradients:
    """Exact gradients from (N,) upstream gradients; fills the certificate. Idle rows cost nothing."""
    certificate.fill_exact()
    given = [g for g in (of_divergence, of_logsumexp) if g is not None]
    live = call.mask & torch.stack([g != 0 for g in given]).any(0) if given else call.mask & False
    kind = call.accumulator
    hidden = torch.zeros_like(call.hidden, memory_format=torch.contiguous_format) if wanted.hidden else None
    weight = torch.zeros_like(call.weight, dtype=kind) if wanted.weight else None
    bias = torch.zeros_like(call.bias, dtype=kind) if wanted.bias and call.bias is not None else None
    for index in live.nonzero().squeeze(1).split(chunks.rows):
        block = _Block.of(call.rows(index), chunks)
        upstream = [None if g is None else g[index].to(kind)[:, None] for g in (of_divergence, of_logsumexp)]
        gradient = block.logit_gradient(*upstream)
        if hidden is not None:
            hidden[index] = block.times_weight(gradient).to(hidden.dtype)
        if weight is not None:
            with exact_bf16_products(block.student):
                weight.addmm_(gradient.t(), block.student.hidden.to(kind))
        if bias is not None:
            bias += gradient.sum(0)
    return HeadGradients(
        hidden,
        None if weight is None else weight.to(call.weight.dtype),
        None if bias is None or call.bias is None else bias.to(call.bias.dtype),
    )


class Distributions(NamedTuple):
    """Two distributions over n rows: K outcomes each."""

    p: Tensor  # (n, K) the student's
    q: Tensor  # (n, K)
    d: Tensor  # (n, K) log p - log q, finite where p is zero
    largest: Tensor | None  # (n, 1) outcome that holds most of p; None where p need not sum to one
    logsumexp: Tensor  # (n,) of the logits behind p
    ref_logsumexp: Tensor  # (n,) of those behind q
    shift: Tensor  # (n,) their difference, to more digits


class _Block:
    """n rows of both heads: logits, distributions and the gradient of the student's logits."""

    def __init__(self, call: KLCall, chunks: Chunks, student: Tensor, reference: Tensor) -> None:
        self.call, self.chunks, self.student = call, chunks, call.student
        self.whole: Tensor | None = None
        if call.topk is None or call.topk >= student.shape[1]:
            self.found = distributions(student, reference, call)
            return
        # The reference's k likeliest entries, and all others as one outcome.
        self.places = reference.topk(call.topk, dim=1).indices
        (coarse, self.rest, self.whole), (ref_coarse, _, _) = (
            _coarsened(logits, self.places) for logits in (student, reference)
        )
        self.found = distributions(coarse, ref_coarse, call)

    @classmethod
    def of(cls, call: KLCall, chunks: Chunks) -> _Block:
        return cls(call, chunks, _logits(call.student, chunks), _logits(call.reference, chunks))

    def results(self) -> RowDivergence:
        p, q, d = self.found[:3]
        of_rows = self.found.logsumexp, self.found.ref_logsumexp, self.found.shift
        beta, direction = self.call.beta, self.call.direction
        if direction == "jsd":
            u, m = self._over_mixture(), torch.lerp(p, q, beta)
            center = _divergence(p, m, u)
            divergence = (1 - beta) * center + beta * _divergence(q, m, u.sub_(d))
            return RowDivergence(divergence, *of_rows, center)
        divergence = _divergence(p, q, d) if direction == "reverse" else _divergence(q, p, -d)
        return RowDivergence(divergence, *of_rows, divergence)

    def logit_gradient(self, of_divergence: Tensor | None, of_logsumexp: Tensor | None) -> Tensor:
        """(n, V) dL/d(x·w + bias) of (n, 1) upstream gradients; without both, that of the divergence."""
        p, q, d, largest = self.found[:4]
        direction = self.call.direction
        if direction == "forward":
            gradient = p - q
        else:
            value = d.clone() if direction == "reverse" else self._over_mixture()
            factor = 1.0 if direction == "reverse" else 1 - self.call.beta
            if largest is not None:  # p sums to one
                other = q if direction == "reverse" else torch.lerp(p, q, self.call.beta)
                value -= _divergence(p, other, value)[:, None]
            gradient = value.mul_(p).mul_(factor)
        if largest is not None:
            # The entries add up to zero. Where p is nearly one, its own is a difference of numbers near one.
            gradient.scatter_(1, largest, 0)
            gradient.scatter_(1, largest, -gradient.sum(1, keepdim=True))
        if of_divergence is not None:
            gradient *= of_divergence
        elif of_logsumexp is not None:
            gradient.zero_()
        if of_logsumexp is not None:
            gradient += of_logsumexp * p
        if self.whole is not None:
            share = (self.whole - finite_or_zero(self.rest)[:, None]).exp_()  # of what is outside the top
            gradient = (share * gradient[:, -1:]).scatter_(1, self.places, gradient[:, :-1])
        return self._of_products(gradient)

    def times_weight(self, gradient: Tensor) -> Tensor:
        """(n, H) dL/dhidden of such a gradient."""
        weight, kind = self.student.weight, gradient.dtype
        total = torch.zeros_like(self.student.hidden, dtype=kind)
        with exact_bf16_products(self.student):
            for columns in self.chunks.of_columns(weight.shape[0]):
                total.addmm_(gradient[:, columns], weight[columns].to(kind))
        return total

    def _over_mixture(self) -> Tensor:
        """(n, K) log p - log m, m = (1 - beta)·p + beta·q."""
        beta, d = self.call.beta, self.found.d
        floor = d.new_tensor(math.log1p(-beta))
        return torch.logaddexp(floor, math.log(beta) - d).neg_()

    def _of_products(self, gradient: Tensor) -> Tensor:
        student = self.student
        if student.softcap is None:
            return gradient if student.is_plain else gradient.mul_(student.slope(gradient))
        with exact_bf16_products(student):
            for columns in self.chunks.of_columns(student.vocabulary):
                gradient[:, columns] *= student.slope(student.products(columns))
        return gradient


def _logits(call: HeadCall, chunks: Chunks) -> Tensor:
    """(n, V) of one head."""
    logits = call.hidden.new_empty((call.hidden.shape[0], call.vocabulary), dtype=call.accumulator)
    with exact_bf16_products(call):
        for columns in chunks.of_columns(call.vocabulary):
            logits[:, columns] = call.logits(columns)
    return logits


def _coarsened(logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(n, k + 1) logits of the places and of all others together; those others' log-sum-exp, and the logits
    with -inf at the places, in place.
    """
    chosen = logits.gather(1, places)
    logits.scatter_(1, places, -torch.inf)
    rest = logits.logsumexp(1)
    return torch.cat([chosen, rest[:, None]], 1), rest, logits


def distributions(a: Tensor, b: Tensor, call: KLCall) -> Distributions:
    """Of both (n, K) logits, which are overwritten; under `call.logsumexp` they are parts of larger ones."""
    if call.logsumexp is not None and call.ref_logsumexp is not None:
        lse, ref_lse, largest = call.logsumexp, call.ref_logsumexp, None
        shift = lse - ref_lse
        p, q = ((z - whole[:, None]).exp_() for z, whole in ((a, lse), (b, ref_lse)))
        d = a.sub_(b).sub_(shift[:, None])
    else:
        (p, maximum, log_sum, largest), (q, ref_maximum, ref_log_sum, _) = _softmax(a), _softmax(b)
        lse, ref_lse = (maximum + log_sum).squeeze(1), (ref_maximum + ref_log_sum).squeeze(1)
        # Relative to the largest logit, so that large logits cancel before anything is rounded.
        log_ratio = finite_or_zero(log_sum) - finite_or_zero(ref_log_sum)
        shift = ((maximum - ref_maximum) + log_ratio).squeeze(1)
        d = a.sub_(b).sub_(log_ratio)
    d.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=LOG_ZERO)
    return Distributions(p, q, d, largest, lse, ref_lse, shift)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(n, K) probabilities, (n, 1) maximum, log Σ exp(z - maximum) and place of the maximum, of logits that
    become relative to it. A shard may hold nothing: its maximum is zero.
    """
    maximum, place = logits.max(1, keepdim=True)
    maximum = finite_or_zero(maximum)
    p = logits.sub_(maximum).exp()
    total = p.sum(1, keepdim=True)
    p /= torch.where(total == 0, 1, total)
    return p, maximum, total.log(), place


def _divergence(p: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """(n,) Σ p·(exp(-d) - 1 + d) of (n, K)."""
    return divergence_terms(p, q, d).sum(1)


def divergence_terms(p: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """p·(exp(-d) - 1 + d), where q = p·exp(-d), which neither over- nor underflows; at least zero."""
    terms = torch.expm1(-d).add_(d).mul_(p)
    far = torch.addcmul(q - p, p, d)
    return torch.where(d > -1, terms, far).clamp_(min=0)
