"""The policy loss: per-token surrogate, KL and entropy terms, each times its token's weight, summed."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.objective.batch import PreparedBatch, prepare
from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.objective.kl import kl_estimate
from grpo_fast.objective.metrics import kl_metrics, mismatch_metrics, policy_metrics
from grpo_fast.objective.registry import SURROGATES, load_custom
from grpo_fast.objective.types import LossFunction, LossInputs, LossOutputs


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
        return load_custom(config.loss_type)(inputs)
    batch = prepare(inputs, config)
    surrogate = SURROGATES[config.facts.surrogate](batch.tokens, config)
    metrics = policy_metrics(surrogate, batch, config) | mismatch_metrics(batch)

    terms = surrogate.loss
    if config.needs_sampler and not surrogate.uses_sampler_weight:
        terms = terms * batch.tokens.sampler_weight
    if inputs.policy_weights is not None:
        terms = terms * torch.where(inputs.loss_mask, inputs.policy_weights, 0)
    terms = torch.where(batch.keep, terms, 0)

    if batch.ref_logprobs is not None:
        kl = kl_estimate(batch.tokens.logprobs, batch.ref_logprobs, config.kl_kind)
        metrics |= kl_metrics(kl, batch)
        if config.beta > 0 and not config.kl_in_reward:
            ratio = batch.tokens.log_ratio.exp() if config.use_bias_correction_kl else 1
            terms = terms + config.beta * ratio * kl
    loss = (batch.weights * terms).sum()

    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * (batch.entropy_mean * batch.entropy).sum()
    if config.value_coef > 0:
        value_loss = _value_loss(inputs, batch)
        metrics["value_loss"] = value_loss.detach()
        loss = loss + config.value_coef * value_loss
    return LossOutputs(loss, metrics)


def resolve_loss(loss: str | GRPOLossConfig) -> LossFunction:
    """The function `LossInputs -> LossOutputs` behind a name, an import path or a configuration.

    Args:
        loss: a word of `catalog.CATALOG`, a user's `package.module:function`, or a whole configuration.

    Raises:
        ValueError: the name is unknown, or the path does not lead to a function.
    """
    config = GRPOLossConfig(loss_type=loss) if isinstance(loss, str) else loss
    if config.is_custom:
        return load_custom(config.loss_type)
    return lambda inputs: policy_loss(inputs, config)


def _value_loss(inputs: LossInputs, batch: PreparedBatch) -> Tensor:
    error = torch.where(inputs.loss_mask, inputs.values - inputs.returns.detach(), 0)
    return 0.5 * (batch.token_mean * error.square()).sum()
