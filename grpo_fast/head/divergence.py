"""Divergences of two heads in plain torch: a block of rows at a time, any device, any float dtype.

Both heads' logits exist for one block of rows over the whole vocabulary, so that a gradient costs one more
product and no second pair of logit products. With d = log p - log q, the Kullback-Leibler divergence is

    KL(p || q) = Σ p·(exp(-d) - 1 + d)

because p and q both sum to one. Every term is at least zero, and an error of a log-sum-exp enters in second
order only, whereas Σ p·d loses digits to cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.head.call import (
    LOG_ZERO,
    DivergenceGradients,
    HeadCall,
    HeadGradients,
    KLCall,
    RowDivergence,
    Saved,
    Wanted,
)
from grpo_fast.head.plan import Chunks, divergence_chunks, range_of
from grpo_fast.head.reference import exact_bf16_products, finite_or_zero


def forward(call: KLCall) -> tuple[RowDivergence, Saved]:
    """Compute every row's divergence, and ddivergence/dhidden if the student has `jacobian`."""
    rows, saved = RowDivergence.allocate(call), Saved.empty(call.student, jacobian=call.student.jacobian)
    upstream = DivergenceGradients(torch.ones_like(rows.divergence)) if call.student.jacobian else None
    for index, block, gradient in _blocks(call, call.mask, upstream, rows):
        if upstream is not None:
            saved.jacobian[index] = _times_weight(gradient, block)
    return rows, saved


def backward(
    call: KLCall, rows: RowDivergence, gradients: DivergenceGradients, wanted: Wanted
) -> HeadGradients:
    """Compute exact gradients. Rows without an upstream gradient cost nothing."""
    head, kind = call.student, call.student.accumulator
    hidden = torch.zeros_like(head.hidden, memory_format=torch.contiguous_format) if wanted.hidden else None
    weight = torch.zeros_like(head.weight, dtype=kind) if wanted.weight else None
    bias = torch.zeros_like(head.bias, dtype=kind) if wanted.bias and head.bias is not None else None
    for index, block, gradient in _blocks(call, gradients.live(call), gradients, rows, known=True):
        if hidden is not None:
            hidden[index] = _times_weight(gradient, block).to(hidden.dtype)
        if weight is not None:
            with exact_bf16_products(block):
                weight.addmm_(gradient.t(), block.hidden.to(kind))
        if bias is not None:
            bias += gradient.sum(0)
    parameters = (weight, head.weight), (bias, head.bias)
    return HeadGradients(hidden, *(t if t is None or of is None else t.to(of.dtype) for t, of in parameters))


def _blocks(
    call: KLCall,
    mask: Tensor,
    upstream: DivergenceGradients | None,
    rows: RowDivergence,
    *,
    known: bool = False,
) -> Iterator[tuple[Tensor, HeadCall, Tensor]]:
    """Yield blocks of the mask's rows: their indices, the student's call, and (n, V) dL/d(x·w + bias).

    Without an upstream gradient the last is undefined. The rows' results are filled unless `known`. A
    block's logits are processed a few rows at a time, which fit the caches.
    """
    chunks = _chunks(call.student)
    for index in mask.nonzero().squeeze(1).split(chunks.rows):
        block = call.rows(index)
        student, reference = _logits(block.student), _logits(block.reference)
        for some in range_of(index.numel(), chunks.cached_rows):
            which = index[some]
            given = *(upstream or (None, None)), rows.center if known else None
            of_some = (None if each is None else each[which] for each in given)
            found = _differentiated(block.rows(some), student[some], reference[some], *of_some)
            for every, result in zip(rows, found or (), strict=found is not None):
                every[which] = result
        if upstream is not None:
            _of_products(student, block.student)
        yield index, block.student, student


def _differentiated(
    call: KLCall,
    logits: Tensor,
    reference: Tensor,
    of_divergence: Tensor | None,
    of_logsumexp: Tensor | None,
    center: Tensor | None,
) -> RowDivergence | None:
    """Compute the results of n rows from their (n, V) logits, unless the center is known.

    With an upstream gradient, the student's logits become dL/dlogits.
    """
    a, b, places = logits, reference, None
    if call.topk is not None and call.topk < logits.shape[1]:
        places = reference.topk(call.topk, dim=1).indices
        a, b = _coarsened(logits, places), _coarsened(reference, places)
    rest = a[:, -1:].clone()
    p, q, d, *sums = distributions(a, b, call)
    whole = call.logsumexp is None  # p sums to one
    value, other, beta = d, q, call.beta
    if call.direction == "jsd":  # log p - log m
        value = torch.logaddexp(d.new_tensor(math.log1p(-beta)), math.log(beta) - d).neg_()
        other = torch.lerp(p, q, beta)
    found = None
    if center is None:
        forward = call.direction == "forward"
        center = (divergence_terms(q, p, -d) if forward else divergence_terms(p, other, value)).sum(1)
        divergence = center
        if call.direction == "jsd":
            divergence = (1 - beta) * center + beta * divergence_terms(q, other, value - d).sum(1)
        found = RowDivergence(divergence, sums[0], sums[1], sums[2], center)
    if of_divergence is None:
        return found
    if call.direction == "forward":
        gradient = p - q
    else:
        if whole:
            value -= center[:, None]
        gradient = value.mul_(p)
    if whole:
        largest = p.argmax(1, keepdim=True)
        # The entries sum to zero. Where p is nearly one, the entry's own formula would cancel.
        gradient.scatter_(1, largest, 0).scatter_(1, largest, -gradient.sum(1, keepdim=True))
    gradient *= (1 - beta if call.direction == "jsd" else 1) * of_divergence[:, None]
    if of_logsumexp is not None:
        gradient += of_logsumexp[:, None] * p
    if places is None:
        logits.copy_(gradient)
    else:
        share = logits.sub_(finite_or_zero(rest)).exp_()  # of the entries outside the top
        share.mul_(gradient[:, -1:]).scatter_(1, places, gradient[:, :-1])
    return found


def _chunks(call: HeadCall) -> Chunks:
    size = call.hidden.shape[1]
    return divergence_chunks(call.hidden.device.type, call.vocabulary, size, call.accumulator)


def _times_weight(gradient: Tensor, call: HeadCall) -> Tensor:
    """Compute (n, H) dL/dhidden from (n, V) dL/d(x·w + bias)."""
    total = torch.zeros_like(call.hidden, dtype=gradient.dtype)
    with exact_bf16_products(call):
        for columns in _chunks(call).of_columns(call.vocabulary):
            total.addmm_(gradient[:, columns], call.weight[columns].to(gradient.dtype))
    return total


def _of_products(gradient: Tensor, call: HeadCall) -> None:
    """Multiply dL/dlogits by the slope of the logits, in place."""
    with exact_bf16_products(call):
        for columns in _chunks(call).of_columns(call.vocabulary) if not call.is_plain else ():
            products = gradient[:, columns] if call.softcap is None else call.products(columns)
            gradient[:, columns] *= call.slope(products)


def _logits(call: HeadCall) -> Tensor:
    """Compute (n, V) logits of one head."""
    logits = call.hidden.new_empty((call.hidden.shape[0], call.vocabulary), dtype=call.accumulator)
    with exact_bf16_products(call):
        for columns in _chunks(call).of_columns(call.vocabulary):
            call.logits(columns, out=logits[:, columns])
    return logits


def _coarsened(logits: Tensor, places: Tensor) -> Tensor:
    """Gather (n, k) logits at the places, which become -inf in place, and append the others' log-sum-exp."""
    chosen = logits.gather(1, places)
    return torch.cat([chosen, logits.scatter_(1, places, -torch.inf).logsumexp(1, keepdim=True)], 1)


class Distributions(NamedTuple):
    """Two distributions over n rows: K outcomes each."""

    p: Tensor  # (n, K) the student's
    q: Tensor  # (n, K)
    d: Tensor  # (n, K) log p - log q, made finite by `weighable_`
    logsumexp: Tensor  # (n,) of p's logits
    ref_logsumexp: Tensor  # (n,) of q's logits
    shift: Tensor  # (n,) their difference, to more digits


def distributions(a: Tensor, b: Tensor, call: KLCall) -> Distributions:
    """Normalize both (n, K) logits, which are overwritten; with `call.logsumexp` they are parts of rows."""
    if call.logsumexp is not None and call.ref_logsumexp is not None:
        lse, ref_lse = call.logsumexp, call.ref_logsumexp
        shift = lse - ref_lse
        p, q = ((z - whole[:, None]).exp_() for z, whole in ((a, lse), (b, ref_lse)))
        d = a.sub_(b).sub_(shift[:, None])
    else:
        (p, maximum, log_sum), (q, ref_maximum, ref_log_sum) = _softmax(a), _softmax(b)
        lse, ref_lse = (maximum + log_sum).squeeze(1), (ref_maximum + ref_log_sum).squeeze(1)
        # Relative to the largest logit, so that large logits cancel before anything is rounded.
        log_ratio = finite_or_zero(log_sum) - finite_or_zero(ref_log_sum)
        shift = ((maximum - ref_maximum) + log_ratio).squeeze(1)
        d = a.sub_(b).sub_(log_ratio)
    return Distributions(p, q, weighable_(d, call.direction, p, q), lse, ref_lse, shift)


def weighable_(d: Tensor, direction: str, p: Tensor, q: Tensor) -> Tensor:
    """Make log p - log q finite, in place, except where the divergence is infinite.

    It is infinite where the distribution that weights it has mass and the other has none.
    """
    weight = {"reverse": p, "forward": q}.get(direction)
    above = torch.inf if direction == "reverse" else -LOG_ZERO
    d.nan_to_num_(nan=0.0, posinf=above, neginf=-torch.inf if direction == "forward" else LOG_ZERO)
    return d if weight is None else d.masked_fill_(weight == 0, 0)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (n, K) probabilities, (n, 1) maximum and log Σ exp(z - maximum); logits become z - maximum.

    The maximum of a shard whose logits are all -inf is zero.
    """
    maximum = finite_or_zero(logits.amax(1, keepdim=True))
    p = logits.sub_(maximum).exp()
    total = p.sum(1, keepdim=True)
    p /= torch.where(total == 0, 1, total)
    return p, maximum, total.log()


def divergence_terms(p: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """Compute p·(exp(-d) - 1 + d), where q = p·exp(-d), without over- or underflow; at least zero.

    Below d = -1 it is p·(d - 1) + q. Each form is zero in the other's range, because selecting by a mask
    takes a CPU longer than computing both.
    """
    near, beyond = d.clamp(min=-1), d.clamp(max=-1).add_(1)
    terms = torch.expm1(-near).add_(near).mul_(p).addcmul_(p, beyond)
    return terms.add_(q.sub(p, alpha=math.e).clamp_(min=0)).clamp_(min=0)
