"""A micro-batch made ready: masked entries cleaned away, weights of the step worked out, tokens chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.objective.aggregation import step_totals, token_weights
from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.objective.correction import off_policy_keep, sampler_weights
from grpo_fast.objective.entropy import entropy_threshold
from grpo_fast.objective.segments import Segments
from grpo_fast.objective.surrogates import PolicyTokens
from grpo_fast.objective.types import LossInputs, StepTotals


@dataclass(frozen=True)
class PreparedBatch:
    """What the terms of the loss are computed from. Every tensor is (N,), zero where no token counts."""

    tokens: PolicyTokens
    ref_logprobs: Tensor | None
    sampler_logprobs: Tensor | None
    entropy: Tensor | None
    weights: Tensor  # of the loss type's aggregation
    token_mean: Tensor  # make a sum the step's mean over tokens
    measured_token_mean: Tensor  # the same over the tokens that the step's batches hold, for metrics
    entropy_mean: Tensor  # the same over the tokens that top_entropy_quantile keeps
    measured_sequence_mean: Tensor  # over the sequences they hold, of the mean over tokens
    keep: Tensor  # bool: tokens whose policy term counts

    @property
    def segments(self) -> Segments:
        return self.tokens.segments


def prepare(inputs: LossInputs, config: GRPOLossConfig) -> PreparedBatch:
    """Check that what the configuration needs is there, and work out masks and weights.

    Raises:
        ValueError: an input is missing.
    """
    _check(inputs, config)
    mask = inputs.loss_mask

    def clean(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(mask, values, 0)

    totals = inputs.totals or step_totals(mask, inputs.num_sequences)
    segments = Segments.of(inputs.sequence_ids, mask, inputs.num_sequences, inputs.logprobs.dtype)
    logprobs = clean(inputs.logprobs)
    old_logprobs = logprobs.detach() if inputs.old_logprobs is None else clean(inputs.old_logprobs)
    sampler_logprobs = clean(inputs.sampler_logprobs)
    advantages = clean(inputs.advantages).to(logprobs.dtype)
    token_mean = token_weights("token_mean", segments, totals)
    measured = _measured(totals)

    keep, entropy_mean = mask, token_mean
    if config.top_entropy_quantile < 1:
        threshold = totals.entropy_threshold
        if threshold is None:
            threshold = entropy_threshold(inputs.entropy, mask, config.top_entropy_quantile)
        keep = mask & (inputs.entropy.detach() >= threshold)
        kept_share = keep.sum().clamp(min=1) / mask.sum().to(token_mean.dtype)
        entropy_mean = token_mean * keep / kept_share
    if config.off_policy_mask_threshold is not None:
        behaviour = old_logprobs if sampler_logprobs is None else sampler_logprobs
        keep = keep & off_policy_keep(
            logprobs, behaviour, advantages, segments, config.off_policy_mask_threshold
        )
    weight = None
    if sampler_logprobs is not None:
        weight = sampler_weights(old_logprobs, sampler_logprobs, segments, config)
    return PreparedBatch(
        tokens=PolicyTokens(logprobs, old_logprobs, advantages, segments, weight),
        ref_logprobs=clean(inputs.ref_logprobs),
        sampler_logprobs=sampler_logprobs,
        entropy=clean(inputs.entropy),
        weights=token_weights(config.facts.aggregation, segments, totals, config.max_completion_length),
        token_mean=token_mean,
        entropy_mean=entropy_mean,
        measured_token_mean=token_weights("token_mean", segments, measured),
        measured_sequence_mean=token_weights("sequence_mean", segments, measured),
        keep=keep,
    )


def _measured(totals: StepTotals) -> StepTotals:
    tokens, sequences = totals.measured_tokens, totals.measured_sequences
    return StepTotals(
        num_tokens=totals.num_tokens if tokens is None else tokens,
        num_sequences=totals.num_sequences if sequences is None else sequences,
    )


def _check(inputs: LossInputs, config: GRPOLossConfig) -> None:
    if config.needs_reference and not config.kl_in_reward and inputs.ref_logprobs is None:
        raise ValueError(
            f"ref_logprobs is None, but beta = {config.beta} weighs a KL to the reference model; give its "
            "log-probabilities of the tokens, or set beta = 0"
        )
    if config.needs_entropy and inputs.entropy is None:
        raise ValueError(
            "entropy is None, but entropy_coef, use_adaptive_entropy or top_entropy_quantile needs it; ask "
            "the head for outputs=('logprob', 'entropy')"
        )
    if config.needs_sampler and inputs.sampler_logprobs is None:
        raise ValueError(
            f"sampler_logprobs is None, but sampler_correction = {config.sampler_correction!r} corrects for "
            "them; have the engine report them, or set sampler_correction = 'none'"
        )
    if config.value_coef > 0 and (inputs.values is None or inputs.returns is None):
        raise ValueError(
            f"value_coef = {config.value_coef}, but values or returns is None: GRPO has no critic, the "
            "group's mean reward is its baseline; bring a value head and pass its values and returns, or set "
            "value_coef = 0"
        )
