"""Inputs and results of the policy loss kernel. This module needs no Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

SUMS = (
    "loss", "policy/ratio_mean", "policy/masked_mean", "clip_ratio/low_mean", "clip_ratio/high_mean",
    "clip_ratio/delta_mean", "clip_ratio/region_mean", "entropy", "kl", "sampling/logp_difference_mean",
    "sampling/kl", "sampling/kl_k1", "sampling/ratio_outside_mean", "sampling/importance_ratio_mean",
    "sampling/rejected_mean",
)  # fmt: skip
MINIMA = ("policy/ratio_min", "clip_ratio/low_min", "sampling/importance_ratio_min")
MAXIMA = (
    *("policy/ratio_max", "clip_ratio/high_max"),
    *("sampling/logp_difference_max", "sampling/importance_ratio_max"),
)
RESULTS = (*SUMS, *MINIMA, *MAXIMA)
"""Results of each sequence, named as the objective's metrics; extremes without tokens are infinite."""


class PolicyBatch(NamedTuple):
    """N tokens of S sequences, named as in the objective's `LossInputs`."""

    logprobs: Tensor  # (N,) float32
    advantages: Tensor  # (N,) of any float dtype, as all below
    sequence_ids: Tensor  # (N,) int64 in [0, S), a sequence's tokens contiguous: else the loss is NaN
    loss_mask: Tensor  # (N,) bool
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    sampler_logprobs: Tensor | None
    entropy: Tensor | None
    num_sequences: int  # S, at least 1


class LossConstants(NamedTuple):
    """The loss and its constants; names and meanings are the objective's."""

    surrogate: str  # "clip", "cispo", "sapo", "reinforce", "dro", "dppo_tv" or "dppo_kl"
    level: str  # of the ratio: "token", "sequence", "sequence_token" or "product"
    aggregation: str
    # clip: bounds of the log-ratio; cispo: of the ratio; dppo: of the divergence; sapo: temperatures for
    # advantages that are not positive, and positive
    low: float
    high: float
    cap: float  # clip: of the log-ratio where the advantage is negative; dppo: of the ratio
    kl: str  # estimator
    beta: float  # weight of the KL in the loss; 0 reports it only
    correct_kl: bool  # times the ratio
    entropy_coef: float
    correction_level: str  # of π_old/π_sampler: "none", "token", "sequence" or "geometric"
    correction_masks: bool  # zero beyond the bounds; else clamped to them
    correction_min: float
    correction_max: float
    drift_max: float  # off-policy mask; infinite for none
    ratio_band: float
    # Of the whole step; below zero: of this batch.
    num_tokens: float
    num_sequences: float
    measured_tokens: float
    measured_sequences: float
    max_completion_length: float  # read by "constant_length"
