"""The policy loss: per-token surrogate, KL and entropy terms, each times its token's weight, summed."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from grpo_fast.lookup import OBJECT_MARK, load_callable
from grpo_fast.objective.catalog import GRPOLossConfig, KLEstimator
from grpo_fast.objective.correction import off_policy_keep, sampler_weights
from grpo_fast.objective.entropy import entropy_threshold
from grpo_fast.objective.metrics import mismatch_metrics, policy_metrics
from grpo_fast.objective.surrogates import SURROGATES, PolicyTokens, PreparedBatch, held_back
from grpo_fast.objective.types import (
    LossFunction,
    LossInputs,
    LossOutputs,
    Segments,
    StepTotals,
    present,
    step_totals,
    token_weights,
)


def policy_loss(inputs: LossInputs, config: GRPOLossConfig) -> LossOutputs:
    """The loss that `config.loss_type` names, for one micro-batch.

        loss = Σ_t w_t (keep_t · c_t · surrogate_t + β · kl_t) − entropy_coef · Σ_t e_t · entropy_t

    w: the loss's aggregation over the whole step (`StepTotals`); keep: the entropy and off-policy masks;
    c: the sampler correction, times `LossInputs.policy_weights`; e: a mean over the tokens that the entropy
    mask keeps. Losses and metrics of a step's micro-batches add up to the step's.

    Returns:
        `loss` () and `metrics`, see `LossOutputs`. A custom loss (`module:function`) returns its own.

    Raises:
        ValueError: an input that the configuration needs is missing.
    """
    if config.is_custom:
        return _load_custom(config.loss_type)(inputs)
    batch = _prepare(inputs, config)
    surrogate = SURROGATES[config.facts.surrogate](batch.tokens, config)
    metrics = policy_metrics(surrogate, batch, config) | mismatch_metrics(batch)

    terms = surrogate.loss
    if config.needs_sampler and not surrogate.uses_sampler_weight:
        terms = terms * present(batch.tokens.sampler_weight)
    if inputs.policy_weights is not None:
        terms = terms * torch.where(inputs.loss_mask, inputs.policy_weights, 0)
    terms = torch.where(batch.keep, terms, 0)

    if batch.ref_logprobs is not None:
        kl = kl_estimate(batch.tokens.logprobs, batch.ref_logprobs, config.kl_kind)
        metrics["kl"] = (batch.measured_token_mean * kl.detach()).sum()
        if config.beta > 0 and not config.kl_in_reward:
            # Of each token's own ratio, at whichever level the surrogate's is: DeepSeek-V3.2,
            # arXiv 2512.02556, eq. 7.
            ratio = batch.tokens.log_ratio.exp() if config.use_bias_correction_kl else 1
            terms = terms + config.beta * ratio * kl
    loss = (batch.weights * terms).sum()
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * (batch.entropy_mean * present(batch.entropy)).sum()
    return LossOutputs(loss, metrics)


def resolve_loss(loss: str | GRPOLossConfig) -> LossFunction:
    """The function `LossInputs -> LossOutputs` behind a name, an import path or a configuration.

    Args:
        loss: a word of `catalog.CATALOG`, a user's `package.module:function`, or a whole configuration.

    Raises:
        ValueError: the name is unknown, or the path does not lead to a function.
    """
    config = GRPOLossConfig(loss_type=loss) if isinstance(loss, str) else loss
    return _load_custom(config.loss_type) if config.is_custom else partial(policy_loss, config=config)


_import_once = cache(load_callable)


def _load_custom(path: str) -> LossFunction:
    """A user's own loss by import path; TypeError when it returns something other than `LossOutputs`."""
    find = load_callable if OBJECT_MARK in path else _import_once  # two calls may give two objects one name
    function = find(path, "loss_type")

    def checked(inputs: LossInputs) -> LossOutputs:
        outputs = function(inputs)
        if not isinstance(outputs, LossOutputs):
            raise TypeError(
                f"loss_type = {path!r} returned a {type(outputs).__name__}; return "
                "grpo_fast.objective.LossOutputs(loss, metrics)"
            )
        return outputs

    return checked


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(π_θ ‖ π_ref) of each token's distribution, estimated from the token drawn.

    Schulman 2020, "Approximating KL divergence".

    Args:
        logprobs: (N,) log π_θ, differentiable.
        ref_logprobs: (N,) log π_ref.
        estimator: with d = log π_θ − log π_ref: k1 = d, unbiased, but its gradient has zero mean in a loss
            unless importance-corrected; k2 = d²/2, biased, its gradient is the KL's on-policy;
            k3 = e⁻ᵈ − 1 + d, unbiased and never negative.

    Returns:
        (N,), in nats.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    # expm1 keeps the digits that e⁻ᵈ − 1 loses where the two policies nearly agree.
    return torch.expm1(-difference) + difference


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, beta: float, estimator: KLEstimator = "k1") -> Tensor:
    """What `kl_in_reward` takes from each token's reward: (N,), detached, never part of the graph.

    The reward of a whole completion loses the sum over its tokens.
    """
    return beta * kl_estimate(logprobs.detach(), ref_logprobs.detach(), estimator)


def _prepare(inputs: LossInputs, config: GRPOLossConfig) -> PreparedBatch:
    """Masked entries cleaned away, the weights of the step worked out, the tokens chosen.

    Raises:
        ValueError: an input is missing.
    """
    _check(inputs, config)
    mask, totals = inputs.loss_mask, inputs.totals or step_totals(inputs.loss_mask, inputs.num_sequences)

    def clean(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0)

    def optional(values: Tensor | None) -> Tensor | None:
        return None if values is None else clean(values)

    segments = Segments.of(inputs.sequence_ids, mask, inputs.num_sequences, inputs.logprobs.dtype)
    logprobs = clean(inputs.logprobs)
    old_logprobs = logprobs.detach() if inputs.old_logprobs is None else clean(inputs.old_logprobs)
    advantages = clean(inputs.advantages).to(logprobs.dtype)
    sampler_logprobs = optional(inputs.sampler_logprobs)

    keep, entropy_mean = mask, token_weights("token_mean", segments, totals)
    if config.top_entropy_quantile < 1:
        entropy = present(inputs.entropy).detach()
        threshold = totals.entropy_threshold
        if threshold is None:
            threshold = entropy_threshold(entropy, mask, config.top_entropy_quantile)
        keep = mask & (entropy >= threshold)
        if totals.entropy_tokens is None:
            kept_share = keep.sum().clamp(min=1) / mask.sum().to(entropy_mean.dtype)
            entropy_mean = entropy_mean * keep / kept_share
        else:
            entropy_mean = keep.to(entropy_mean.dtype) / max(totals.entropy_tokens, 1)
    if config.off_policy_mask_threshold is not None:
        behaviour = old_logprobs if sampler_logprobs is None else sampler_logprobs
        keep = keep & off_policy_keep(
            logprobs, behaviour, advantages, segments, config.off_policy_mask_threshold
        )
    correction = None
    if sampler_logprobs is not None:
        correction = sampler_weights(old_logprobs, sampler_logprobs, segments, config)
    held = inputs.held_back
    if held is None and config.facts.holds_back:
        held = held_back(logprobs.detach(), old_logprobs, advantages, mask, config)
    measured = StepTotals(
        totals.num_tokens if totals.measured_tokens is None else totals.measured_tokens,
        totals.num_sequences if totals.measured_sequences is None else totals.measured_sequences,
    )
    return PreparedBatch(
        tokens=PolicyTokens(logprobs, old_logprobs, advantages, segments, correction, held),
        ref_logprobs=optional(inputs.ref_logprobs),
        sampler_logprobs=sampler_logprobs,
        entropy=optional(inputs.entropy),
        keep=keep,
        weights=token_weights(config.aggregation_kind, segments, totals, config.max_completion_length),
        entropy_mean=entropy_mean,
        measured_token_mean=token_weights("token_mean", segments, measured),
        measured_sequence_mean=token_weights("sequence_mean", segments, measured),
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
