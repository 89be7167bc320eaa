"""A policy loss over packed tokens in three launches: loss, metrics and dL/dlogp.

The formulas are those of `grpo_fast.objective` (see `policy_terms`). One program handles one sequence: it
first sums what the sequence shares (length, ratio, drift), then processes every token in one pass. A last
launch adds the sequences' sums in a fixed order: results are bit-equal from run to run.

Masked tokens are never read. There is no host synchronization.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import constexpr_function

from .policy_facts import MINIMA, RESULTS, SUMS, LossConstants, PolicyBatch
from .policy_terms import at_most, exp_beyond_linear, kl_term, surrogate_term
from .product import register_bound


def policy_loss(batch: PolicyBatch, loss: LossConstants) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss (), `RESULTS` as a vector, dL/dlogp (N,) and dL/dentropy (N,), all float32.

    The last is empty, (0,), without an entropy term.
    """
    logprobs, ids, num_sequences = batch.logprobs, batch.sequence_ids, batch.num_sequences
    optional = batch.old_logprobs, batch.ref_logprobs, batch.sampler_logprobs, batch.entropy
    count = logprobs.numel()
    blocks = max(1, triton.cdiv(count, _BLOCK))
    bounds = ids.new_zeros((3, num_sequences), dtype=torch.int64)
    tokens = torch.empty(blocks, dtype=torch.int32, device=logprobs.device)
    partial = logprobs.new_empty((len(RESULTS), num_sequences))
    # A token that no sequence covers keeps its NaN.
    gradient = torch.full_like(logprobs, torch.nan)
    has_bonus = batch.entropy is not None and loss.entropy_coef != 0
    of_entropy = torch.full_like(logprobs, torch.nan) if has_bonus else logprobs.new_empty(0)
    result, total = logprobs.new_empty(len(RESULTS)), logprobs.new_empty(())
    config = LossConstants(*(value if isinstance(value, float) else tl.constexpr(value) for value in loss))
    _find_sequences[(blocks,)](ids, batch.loss_mask, bounds, tokens, num_sequences, count, BLOCK=_BLOCK)
    _sequence_loss[(num_sequences,)](
        logprobs, batch.advantages, batch.loss_mask, *optional,
        bounds, tokens, partial, gradient, of_entropy, num_sequences, blocks, config,
        HAS_BONUS=has_bonus, BLOCK=_SEQUENCE_BLOCK, **register_bound(160),
    )  # fmt: skip
    _add_up[(len(RESULTS),)](
        partial, bounds, result, total, num_sequences, count,
        SUMS=len(SUMS), MINIMA=len(MINIMA), BLOCK=_BLOCK,
    )  # fmt: skip
    return total, result, gradient, of_entropy


_BLOCK = 1024
_SEQUENCE_BLOCK = 512  # all options together spill at twice as many


# A micro-batch's slice of a step may start anywhere: its alignment must not recompile the kernels.
_SLICED = PolicyBatch._fields[:-1]


@triton.jit(do_not_specialize=["sequences", "count"], do_not_specialize_on_alignment=_SLICED)
def _find_sequences(
    sequence_ids,  # (N,) int64
    loss_mask,  # (N,) bool
    bounds,  # (3, S) int64, zero: written, first token, end and runs of every sequence
    tokens,  # (blocks,) int32, written: tokens that count
    sequences,
    count,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    own = tl.load(sequence_ids + place, mask=inside, other=-1)
    before = tl.load(sequence_ids + place - 1, mask=inside & (place > 0), other=-1)
    after = tl.load(sequence_ids + place + 1, mask=place + 1 < count, other=-1)
    known = inside & (own >= 0) & (own < sequences)
    starts = known & (own != before)
    tl.store(bounds + own, place, mask=starts)
    tl.atomic_add(bounds + 2 * sequences + own, 1, mask=starts, sem="relaxed")
    tl.store(bounds + sequences + own, place + 1, mask=known & (own != after))
    counted = tl.load(loss_mask + place, mask=inside, other=0) != 0
    tl.store(tokens + tl.program_id(0), tl.sum(counted.to(tl.int32)))


@triton.jit
def _load(pointer, place, counted):
    return tl.load(pointer + place, mask=counted, other=0.0).to(tl.float32)


@triton.jit
def _smallest(values, counted):
    return tl.min(tl.where(counted, values, float("inf")))


@triton.jit
def _largest(values, counted):
    return tl.max(tl.where(counted, values, float("-inf")))


_PLACES = {name: place for place, name in enumerate(RESULTS)}


@constexpr_function
def _place_of(name):
    return _PLACES[name]


@triton.jit
def _hand_over(row, sequences, value, NAME: tl.constexpr):
    tl.store(row + _place_of(NAME) * sequences, value)


@triton.jit(do_not_specialize=["sequences", "blocks"], do_not_specialize_on_alignment=_SLICED)
def _sequence_loss(
    logprobs,  # (N,) as the next six, of which the last four may be None
    advantages,
    loss_mask,
    old_logprobs,
    ref_logprobs,
    sampler_logprobs,
    entropy,
    bounds,  # (3, S) int64
    tokens,  # (blocks,) int32
    partial,  # (RESULTS, S) float32, written
    gradient,  # (N,) float32, written
    entropy_gradient,  # (N,) float32, written when HAS_BONUS
    sequences,
    blocks,
    config,  # `LossConstants`: numbers, and constants that choose the code
    HAS_BONUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    SHARED: tl.constexpr = config.level == "sequence" or config.level == "product"
    sequence = tl.program_id(0)
    first, last = tl.load(bounds + sequence), tl.load(bounds + sequences + sequence)
    lane = tl.arange(0, BLOCK)
    in_batch = 0
    for start in range(0, blocks, BLOCK):
        in_batch += tl.sum(tl.load(tokens + start + lane, mask=start + lane < blocks, other=0))
    in_step = tl.where(config.num_tokens < 0, in_batch.to(tl.float32), config.num_tokens)
    in_measure = tl.maximum(tl.where(config.measured_tokens < 0, in_step, config.measured_tokens), 1.0)
    in_step = tl.maximum(in_step, 1.0)
    sequences_in_step = tl.where(config.num_sequences < 0, sequences.to(tl.float32), config.num_sequences)
    sequences_in_measure = tl.where(
        config.measured_sequences < 0, sequences_in_step, config.measured_sequences
    )

    length, moved, mismatch, drift = 0.0, 0.0, 0.0, 0.0
    for start in range(first, last, BLOCK):
        place = start + lane
        counted = tl.load(loss_mask + place, mask=place < last, other=0) != 0
        logprob = _load(logprobs, place, counted)
        old = _load(old_logprobs, place, counted) if old_logprobs is not None else logprob
        sampled = _load(sampler_logprobs, place, counted) if sampler_logprobs is not None else old
        length += tl.sum(counted.to(tl.float32))
        moved += tl.sum(logprob - old)
        mismatch += tl.sum(old - sampled)
        drift += tl.sum(sampled - logprob)
    length = tl.maximum(length, 1.0)
    shared_log_ratio = moved if config.level == "product" else moved / length
    shared_mismatch = mismatch if config.correction_level == "sequence" else mismatch / length
    drift /= length
    if config.aggregation == "token_mean":
        weight = 1.0 / in_step
    else:
        weight = 1.0 / tl.maximum(sequences_in_step, 1.0)
        if config.aggregation == "sequence_mean":
            weight /= length
        elif config.aggregation == "constant_length":
            weight /= config.max_completion_length
    # A sequence in several runs has the bounds of any of them.
    weight = tl.where(tl.load(bounds + 2 * sequences + sequence) > 1, float("nan"), weight)
    token_mean = 1.0 / in_measure
    mean = 1.0 / tl.maximum(sequences_in_measure, 1.0) / length if SHARED else token_mean

    loss, shared_slope, ratio_sum, masked, lows, highs, deltas = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    entropy_sum, kl_sum, differences, sampling_kl, sampling_k1 = 0.0, 0.0, 0.0, 0.0, 0.0
    outside_sum, weight_sum, rejected = 0.0, 0.0, 0.0
    ratio_min, weight_min = float("inf"), float("inf")
    ratio_max, weight_max, difference_max = float("-inf"), float("-inf"), float("-inf")
    for start in range(first, last, BLOCK):
        place = start + lane
        counted = tl.load(loss_mask + place, mask=place < last, other=0) != 0
        logprob = _load(logprobs, place, counted)
        advantage = _load(advantages, place, counted)
        old = _load(old_logprobs, place, counted) if old_logprobs is not None else logprob
        own_log_ratio = logprob - old
        log_ratio = own_log_ratio if config.level == "token" else shared_log_ratio + tl.zeros_like(logprob)
        term, slope, ratio, is_low, is_high, is_delta = surrogate_term(
            logprob, old, log_ratio, advantage, config.low, config.high, config.cap, config.surrogate
        )
        if sampler_logprobs is not None:
            difference = old - _load(sampler_logprobs, place, counted)
            corrected = tl.exp(difference)
            distance = tl.abs(difference)
            outside = (corrected < 1.0 - config.ratio_band) | (corrected > 1.0 + config.ratio_band)
            if config.correction_level == "none":
                corrected = tl.full(logprob.shape, 1.0, tl.float32)
            else:
                if config.correction_level != "token":
                    corrected = tl.exp(shared_mismatch + tl.zeros_like(logprob))
                below, above = corrected < config.correction_min, corrected > config.correction_max
                if config.correction_masks:
                    corrected = tl.where(below | above, 0.0, corrected)
                else:
                    corrected = tl.where(
                        below, config.correction_min, at_most(corrected, config.correction_max)
                    )
                term *= corrected
                slope *= corrected
            differences += tl.sum(tl.where(counted, distance, 0.0))
            difference_max = tl.maximum(difference_max, _largest(distance, counted))
            sampling_kl += tl.sum(tl.where(counted, exp_beyond_linear(difference), 0.0))
            sampling_k1 -= tl.sum(tl.where(counted, difference, 0.0))
            outside_sum += tl.sum((outside & counted).to(tl.float32))
            weight_sum += tl.sum(tl.where(counted, corrected, 0.0))
            weight_min = tl.minimum(weight_min, _smallest(corrected, counted))
            weight_max = tl.maximum(weight_max, _largest(corrected, counted))
            rejected += tl.sum(((corrected == 0.0) & counted).to(tl.float32))
        allowed = tl.where(advantage >= 0, float("inf"), config.drift_max)
        kept = counted & ((drift <= allowed) | (allowed == float("inf")))
        loss += weight * tl.sum(tl.where(kept, term, 0.0))
        slope = tl.where(kept, weight * slope, 0.0)
        if SHARED:
            shared_slope += tl.sum(slope)
            slope = tl.zeros_like(slope)
        if ref_logprobs is not None:
            kl, kl_slope = kl_term(logprob - _load(ref_logprobs, place, counted), config.kl)
            kl_sum += tl.sum(tl.where(counted, kl, 0.0))
            if config.correct_kl:
                own_ratio = tl.exp(own_log_ratio)
                kl, kl_slope = own_ratio * kl, own_ratio * (kl + kl_slope)
            if config.beta > 0:
                loss += weight * config.beta * tl.sum(tl.where(counted, kl, 0.0))
                slope += tl.where(counted, weight * config.beta * kl_slope, 0.0)
        tl.store(gradient + place, slope, mask=place < last)
        if HAS_BONUS:
            bonus = tl.where(counted, -config.entropy_coef / in_step, 0.0)
            tl.store(entropy_gradient + place, bonus, mask=place < last)
        if entropy is not None:
            entropy_sum += tl.sum(_load(entropy, place, counted))
        ratio_sum += tl.sum(tl.where(counted, ratio, 0.0))
        ratio_min = tl.minimum(ratio_min, _smallest(ratio, counted))
        ratio_max = tl.maximum(ratio_max, _largest(ratio, counted))
        masked += tl.sum(counted.to(tl.float32)) - tl.sum(kept.to(tl.float32))
        lows += tl.sum((is_low & counted).to(tl.float32))
        highs += tl.sum((is_high & counted).to(tl.float32))
        deltas += tl.sum((is_delta & counted).to(tl.float32))
    if SHARED:
        if config.level == "sequence":
            shared_slope /= length
        tl.debug_barrier()
        for start in range(first, last, BLOCK):
            place = start + lane
            counted = tl.load(loss_mask + place, mask=place < last, other=0) != 0
            own = tl.load(gradient + place, mask=counted, other=0.0)
            tl.store(gradient + place, own + shared_slope, mask=counted)
    if HAS_BONUS:
        loss -= config.entropy_coef / in_step * entropy_sum
    nothing = ratio_max == float("-inf")
    row = partial + sequence
    _hand_over(row, sequences, loss, "loss")
    _hand_over(row, sequences, ratio_sum * mean, "policy/ratio_mean")
    _hand_over(row, sequences, masked * token_mean, "policy/masked_mean")
    _hand_over(row, sequences, lows * mean, "clip_ratio/low_mean")
    _hand_over(row, sequences, highs * mean, "clip_ratio/high_mean")
    _hand_over(row, sequences, deltas * mean, "clip_ratio/delta_mean")
    _hand_over(row, sequences, (lows + highs) * mean, "clip_ratio/region_mean")
    _hand_over(row, sequences, entropy_sum * token_mean, "entropy")
    _hand_over(row, sequences, kl_sum * token_mean, "kl")
    _hand_over(row, sequences, differences * token_mean, "sampling/logp_difference_mean")
    _hand_over(row, sequences, sampling_kl * token_mean, "sampling/kl")
    _hand_over(row, sequences, sampling_k1 * token_mean, "sampling/kl_k1")
    _hand_over(row, sequences, outside_sum * token_mean, "sampling/ratio_outside_mean")
    _hand_over(row, sequences, weight_sum * token_mean, "sampling/importance_ratio_mean")
    _hand_over(row, sequences, rejected * token_mean, "sampling/rejected_mean")
    _hand_over(row, sequences, ratio_min, "policy/ratio_min")
    _hand_over(row, sequences, tl.where(nothing, float("inf"), lows / length), "clip_ratio/low_min")
    _hand_over(row, sequences, weight_min, "sampling/importance_ratio_min")
    _hand_over(row, sequences, ratio_max, "policy/ratio_max")
    _hand_over(row, sequences, tl.where(nothing, float("-inf"), highs / length), "clip_ratio/high_max")
    _hand_over(row, sequences, difference_max, "sampling/logp_difference_max")
    _hand_over(row, sequences, weight_max, "sampling/importance_ratio_max")


@triton.jit(do_not_specialize=["sequences", "count"])
def _add_up(
    partial,  # (RESULTS, S) float32
    bounds,  # (3, S) int64
    result,  # (RESULTS,) float32, written
    loss,  # () float32, written
    sequences,
    count,
    SUMS: tl.constexpr,
    MINIMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce one result over the sequences. Tokens outside every sequence make the sums NaN."""
    which = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    total, least, most = 0.0, float("inf"), float("-inf")
    covered = tl.zeros((), tl.int64)
    for start in range(0, sequences, BLOCK):
        sequence = start + lane
        inside = sequence < sequences
        values = tl.load(partial + which * sequences + sequence, mask=inside, other=0.0)
        total += tl.sum(values)
        least = tl.minimum(least, _smallest(values, inside))
        most = tl.maximum(most, _largest(values, inside))
        first = tl.load(bounds + sequence, mask=inside, other=0)
        covered += tl.sum(tl.load(bounds + sequences + sequence, mask=inside, other=0) - first)
    total = tl.where(covered == count, total, float("nan"))
    found = tl.where(which < SUMS, total, tl.where(which < SUMS + MINIMA, least, most))
    tl.store(result + which, found)
    if which == 0:
        tl.store(loss, found)
