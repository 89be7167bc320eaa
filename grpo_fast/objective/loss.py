"""The policy loss: per-token surrogate, KL and entropy terms, each times its token's weight, summed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_fast.config.lookup import load_once
from grpo_fast.objective.catalog import RatioLevel
from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.objective.metrics import policy_metrics
from grpo_fast.objective.surrogates import PolicyTokens, Surrogate, log_importance, surrogate_of
from grpo_fast.objective.terms import entropy_threshold, kl_estimate, off_policy_keep, sampler_weights
from grpo_fast.objective.types import (
    FLOATS,
    TOKEN_COLUMNS,
    LossFunction,
    LossInputs,
    LossOutputs,
    StepTotals,
    check_custom,
    present,
    refuse_gradients,
    step_totals,
    token_weights,
)


def policy_loss(inputs: LossInputs, config: GRPOLossConfig, entropy_coef: float | None = None) -> LossOutputs:
    """Compute the loss that `config.loss_type` names, for one micro-batch.

        loss = Σ_t w_t (keep_t · c_t · surrogate_t + β · kl_t) − entropy_coef · Σ_t e_t · entropy_t

    w: the loss's aggregation over the whole step (`StepTotals`); keep: the entropy and off-policy masks;
    c: the sampler correction, times `LossInputs.policy_weights`; e: a mean over the tokens that the entropy
    mask keeps. Losses and metrics of micro-batches add up to the step's, except for clip_cov, kl_cov and
    top_entropy_quantile, which choose tokens within the micro-batch.

    Args:
        inputs: the micro-batch.
        config: the loss and its constants.
        entropy_coef: replaces the configuration's.

    Returns:
        The loss () and metrics. A custom loss (`module:function`) returns its own.

    Raises:
        ValueError: a needed input is missing, or a token column that is read as a constant requires grad.
    """
    if config.is_custom:
        return _load_custom(config.loss_type)(inputs)
    refuse_gradients({name: getattr(inputs, name) for name in TOKEN_COLUMNS})
    entropy_coef = config.entropy_coef if entropy_coef is None else entropy_coef
    _check(inputs, config, entropy_coef)
    totals = inputs.totals or step_totals(inputs.loss_mask, inputs.num_sequences)
    inputs = _zero_masked(inputs)
    logprobs, segments = inputs.logprobs, inputs.sequences
    old_logprobs = logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    correction = None
    if inputs.sampler_logprobs is not None:
        correction = sampler_weights(old_logprobs, inputs.sampler_logprobs, segments, config)
    advantages = inputs.advantages.to(logprobs.dtype)
    tokens = PolicyTokens(logprobs, old_logprobs, advantages, segments, correction)
    keep, entropy_mean = _kept(inputs, tokens, totals, config)
    terms, surrogate, kl = token_terms(
        tokens, config, keep, inputs.ref_logprobs, inputs.policy_weights, exact_kl=inputs.exact_kl
    )
    weights = token_weights(config.aggregation_kind, tokens.segments, totals, config.max_completion_length)
    loss = (weights * terms).sum()
    if entropy_coef > 0:
        loss = loss - entropy_coef * (entropy_mean * present(inputs.entropy)).sum()
    return LossOutputs(loss, policy_metrics(surrogate, tokens, inputs, keep, kl, totals, config))


def token_terms(
    tokens: PolicyTokens,
    config: GRPOLossConfig,
    keep: Tensor | None,
    ref_logprobs: Tensor | None,
    policy_weights: Tensor | None,
    kl_level: RatioLevel = "token",
    exact_kl: Tensor | None = None,
) -> tuple[Tensor, Surrogate, Tensor | None]:
    """Compute keep_t · c_t · surrogate_t + β · kl_t of each token, (N,), and the surrogate and the KL in it.

    Args:
        keep: (N,) bool; None: all.
        kl_level: level of the ratio that corrects the KL; "token" as in DeepSeek-V3.2, arXiv 2512.02556,
            eq. 7, whichever level the surrogate's ratio has.
        exact_kl: (N,), for kl_estimator "exact".
    """
    surrogate = surrogate_of(config)(tokens, config)
    terms = surrogate.loss
    if config.needs_sampler and not surrogate.uses_sampler_weight:
        terms = terms * present(tokens.sampler_weight)
    if policy_weights is not None:
        terms = terms * policy_weights
    if keep is not None:
        terms = torch.where(keep, terms, 0)
    if config.kl_kind == "exact":
        kl = exact_kl
    else:
        kl = None if ref_logprobs is None else kl_estimate(tokens.logprobs, ref_logprobs, config.kl_kind)
    if kl is None:
        return terms, surrogate, None
    if config.beta > 0 and not config.kl_in_reward:
        ratio = log_importance(tokens, kl_level).exp() if config.use_bias_correction_kl else 1
        terms = terms + config.beta * ratio * kl
    return terms, surrogate, kl


def resolve_loss(loss: str | GRPOLossConfig) -> LossFunction:
    """Return the function `LossInputs -> LossOutputs` of a loss.

    Args:
        loss: a name of `catalog.CATALOG`, a `package.module:function`, or a configuration.
    """
    config = GRPOLossConfig(loss_type=loss) if isinstance(loss, str) else loss
    return _load_custom(config.loss_type) if config.is_custom else partial(policy_loss, config=config)


def _load_custom(path: str) -> LossFunction:
    function = load_once(path, "loss_type")

    def checked(inputs: LossInputs) -> LossOutputs:
        if not len(inputs.logprobs):  # a rank without groups in this step, where a mean would be NaN
            return LossOutputs(inputs.logprobs.sum())
        outputs = function(inputs)
        if not isinstance(outputs, LossOutputs):
            raise TypeError(
                f"loss_type = {path!r} returned a {type(outputs).__name__}; return "
                "grpo_fast.objective.LossOutputs(loss, metrics)"
            )
        check_custom(path, outputs.loss, (), differentiable=inputs.logprobs.requires_grad)
        return outputs

    return checked


def _zero_masked(inputs: LossInputs) -> LossInputs:
    names = ["logprobs", "entropy", "exact_kl"]
    names += [name for name, dtypes in TOKEN_COLUMNS.items() if dtypes is FLOATS]
    given = {name: getattr(inputs, name) for name in names}
    kept: dict[str, Any] = {n: torch.where(inputs.loss_mask, v, 0) for n, v in given.items() if v is not None}
    return replace(inputs, **kept)


def _kept(
    inputs: LossInputs, tokens: PolicyTokens, totals: StepTotals, config: GRPOLossConfig
) -> tuple[Tensor, Tensor]:
    """Return which tokens' policy term counts, (N,) bool, and the weights of the mean entropy, (N,)."""
    keep = mask = inputs.loss_mask
    entropy_mean = token_weights("token_mean", tokens.segments, totals)
    if config.top_entropy_quantile < 1:
        entropy = present(inputs.entropy).detach()
        keep = mask & (entropy >= entropy_threshold(entropy, mask, config.top_entropy_quantile))
        kept_share = keep.sum().clamp(min=1) / mask.sum().to(entropy_mean.dtype)
        entropy_mean = entropy_mean * keep / kept_share
    if config.off_policy_mask_threshold is not None:
        behavior = tokens.old_logprobs if inputs.sampler_logprobs is None else inputs.sampler_logprobs
        limit = config.off_policy_mask_threshold
        keep = keep & off_policy_keep(tokens.logprobs, behavior, tokens.advantages, tokens.segments, limit)
    return keep, entropy_mean


_REMEDIES = {
    "exact_kl": "give linear_kl's (linear_grpo_loss: ref_hidden and ref_weight), or another kl_estimator",
    "ref_logprobs": "give the reference model's log-probabilities, or set beta = 0",
    "entropy": "ask the head for outputs=('logprob', 'entropy'), or leave out entropy_coef, "
    "use_adaptive_entropy and top_entropy_quantile",
    "sampler_logprobs": "have the engine report them, or set sampler_correction = 'none'",
}


def _check(inputs: LossInputs, config: GRPOLossConfig, entropy_coef: float) -> None:
    if config.distills:
        name = f"loss_type = {config.loss_type!r}"
        raise ValueError(f"{name} compares distributions; call linear_kl, or train with method: opd")
    reads = {
        "exact_kl": config.needs_exact_kl,
        "ref_logprobs": config.needs_reference and not (config.kl_in_reward or config.needs_exact_kl),
        "entropy": config.needs_entropy or entropy_coef > 0,
        "sampler_logprobs": config.needs_sampler,
    }
    for name, needed in reads.items():
        if needed and getattr(inputs, name) is None:
            raise ValueError(f"{name} is None, and the loss reads it: {_REMEDIES[name]}")
