"""Objectives of ranked groups, flat over the responses of several groups. Higher grades are better."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from grpo_fast.objective.comparisons import RankingLossConfig
from grpo_fast.objective.types import LossOutputs, present

# Nodes of the quadrature over log time: start, end, step. Less than 1e-17 of the clock's probability lies
# beyond them, and the trapezoidal rule's error on this analytic integrand is exp(−π²/step).
_LOG_TIMES = (-40.0, 6.0, 0.125)


@dataclass(frozen=True)
class RankedInputs:
    """One micro-batch of S responses in G groups."""

    logprobs: Tensor  # (S,) float, differentiable: log π_θ(y | x), summed over the completion
    lengths: Tensor  # (S,) completion tokens
    grades: Tensor  # (S,) float64: higher is better, equal is a tie
    advantages: Tensor  # (S,) float: grades with mean 0 and standard deviation 1 in their group
    group_ids: Tensor  # (S,) int64 in [0, G)
    num_groups: int  # G
    ref_logprobs: Tensor | None = None  # (S,) of the reference model
    behaviour_logprobs: Tensor | None = None  # (S,) of the policy that wrote them; NaN: use the reference's
    weights: Tensor | None = None  # (G,) factors of a group's loss; None: 1
    total_groups: int | None = None  # of the whole step; None: this micro-batch is the step


def ranking_loss(inputs: RankedInputs, config: RankingLossConfig) -> LossOutputs:
    """Compute the objective's mean over the step's groups, or raise ValueError without a needed reference.

    A group of ties only adds zero.
    """
    if config.needs_reference and inputs.ref_logprobs is None:
        name = f"objective = {config.objective!r}"
        raise ValueError(f"ref_logprobs is None, but {name} reads them; give them, or set score = 'logprob'")
    per_group = OBJECTIVES[config.objective](inputs, config)
    if inputs.weights is not None:
        per_group = per_group * inputs.weights.detach()
    total = inputs.total_groups or inputs.num_groups
    return LossOutputs(per_group.sum() / total, _metrics(inputs, total))


def plackett_luce(scores: Tensor, grades: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    """Compute −log probability of each group's order, (G,), under Plackett-Luce with log-strengths `scores`.

    A tier of ties has the summed probability of all its orders. In the exponential race that defines the
    model this is the probability that the tier finishes before every response below it,
    ∫ Π_i (1 − exp(−t eˢⁱ / Λ)) e^(−t) dt with Λ = Σ eˢʲ below. It is exact for any number of ties, where
    Efron's and Breslow's formulas are approximations. The factor of a single response is the usual softmax
    (Plackett 1975; for policies: DPO, arXiv 2305.18290, A.3).
    """
    same = group_ids[:, None] == group_ids[None, :]
    below = same & (grades[None, :] < grades[:, None])
    tied = same & (grades[None, :] == grades[:, None])
    races = below.any(dim=1)  # the last tier comes last with certainty
    ids, s = group_ids[races], scores[races].double()
    if not len(s):
        return scores.new_zeros(num_groups)
    rest = scores.double()[None, :].masked_fill(~below[races], -math.inf).logsumexp(dim=1)
    log_strength = s - rest
    losses = log_strength.new_zeros(num_groups)
    alone = tied[races].sum(dim=1) == 1
    losses = losses.index_add(0, ids[alone], -logsigmoid(log_strength[alone]))
    if not alone.all():
        tier = tied[races].to(torch.int8).argmax(dim=1)[~alone]  # named by its first response
        tiers, member_of = tier.unique(return_inverse=True)
        losses = losses.index_add(
            0, group_ids[tiers], _tier_losses(log_strength[~alone], member_of, len(tiers))
        )
    return losses.to(scores.dtype)


def _tier_losses(log_strength: Tensor, member_of: Tensor, num_tiers: int) -> Tensor:
    """Compute −log probability, (num_tiers,), that all M members finish before a clock of rate 1 rings."""
    start, end, step = _LOG_TIMES
    log_time = torch.arange(start, end, step, dtype=torch.float64, device=log_strength.device)
    log_hazard = log_strength[:, None] + log_time  # (M, Q)
    # Below e^-30 the probability of having finished equals the hazard to the last bit.
    finished = torch.where(
        log_hazard < -30.0, log_hazard, torch.log(-torch.expm1(-log_hazard.clamp(-30.0, 30.0).exp()))
    )
    integrand = finished.new_zeros(num_tiers, len(log_time)).index_add(0, member_of, finished)
    return -(integrand + log_time - log_time.exp()).logsumexp(dim=1) - math.log(step)


def _listwise(inputs: RankedInputs, config: RankingLossConfig) -> Tensor:
    return plackett_luce(_scores(inputs, config), inputs.grades, inputs.group_ids, inputs.num_groups)


def _pairwise(inputs: RankedInputs, config: RankingLossConfig) -> Tensor:
    """Average −log σ(better − worse) over pairs of different grade (RankNet, Burges et al. 2005): (G,)."""
    scores, ids = _scores(inputs, config), inputs.group_ids
    better, worse = _ordered_pairs(inputs.grades, ids)
    return _group_mean(-logsigmoid(scores[better] - scores[worse]), ids[better], inputs.num_groups)


def _advantage(inputs: RankedInputs, config: RankingLossConfig) -> Tensor:
    """Clip GSPO's sequence ratio (arXiv 2507.18071, eq. 5 and 7) to the policy that wrote the responses.

    The reference replaces that policy where the data has no log-probability. The clip bounds how far a whole
    run may move a response, 0.2 by default: GSPO's 3e-4 is for the few updates between two rollouts.
    """
    behavior = present(inputs.ref_logprobs)
    if inputs.behaviour_logprobs is not None:
        behavior = torch.where(inputs.behaviour_logprobs.isnan(), behavior, inputs.behaviour_logprobs)
    ratio = torch.exp((inputs.logprobs - behavior) / inputs.lengths)
    advantages = inputs.advantages
    clipped = ratio.clamp(1 - config.epsilon_low, 1 + config.epsilon_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    return _group_mean(losses, inputs.group_ids, inputs.num_groups)


def _advantage_likelihood(inputs: RankedInputs, config: RankingLossConfig) -> Tensor:
    """Compute advantage-weighted regression (AWR, arXiv 1910.00177), weights normalized within the group.

    All weights are positive, so the loss is a likelihood and needs no correction for the policy that wrote
    the responses. A group of ties only is left out: it would only be imitated.
    """
    advantages = inputs.advantages
    weights = torch.exp(advantages / present(config.temperature))
    weights = weights / _group_sum(weights, inputs.group_ids, inputs.num_groups)[inputs.group_ids]
    flat = _group_mean(advantages.abs(), inputs.group_ids, inputs.num_groups) == 0
    logprobs = inputs.logprobs / inputs.lengths if config.length_normalised else inputs.logprobs
    losses = _group_sum(-weights * logprobs, inputs.group_ids, inputs.num_groups)
    return torch.where(flat, 0.0, losses)


OBJECTIVES: dict[str, Callable[[RankedInputs, RankingLossConfig], Tensor]] = {
    "plackett_luce": _listwise,
    "group_relative": _listwise,
    "pairwise": _pairwise,
    "advantage": _advantage,
    "advantage_likelihood": _advantage_likelihood,
}


def _scores(inputs: RankedInputs, config: RankingLossConfig) -> Tensor:
    scores = inputs.logprobs
    if config.score == "logratio":
        scores = scores - present(inputs.ref_logprobs)
    if config.per_token:
        scores = scores / inputs.lengths
    return scores / present(config.temperature)


def _group_sum(values: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add(0, group_ids, values)


def _group_mean(values: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    """Return the means (G,), zero for a group without values."""
    counts = _group_sum(torch.ones_like(values), group_ids, num_groups)
    return _group_sum(values, group_ids, num_groups) / counts.clamp(min=1)


def _ordered_pairs(grades: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices (better, worse) of every two responses of a group with different grades."""
    same = group_ids[:, None] == group_ids[None, :]
    better, worse = (same & (grades[:, None] > grades[None, :])).nonzero(as_tuple=True)
    return better, worse


def _metrics(inputs: RankedInputs, total: int) -> dict[str, Tensor]:
    """Compute shares of the step's means over groups."""
    better, worse = _ordered_pairs(inputs.grades, inputs.group_ids)
    logprobs, ids, groups = inputs.logprobs.detach(), inputs.group_ids, inputs.num_groups
    right = (logprobs[better] > logprobs[worse]).to(logprobs.dtype)
    flat = _group_sum(torch.ones_like(right), ids[better], groups) == 0
    return {
        "ranking/pairwise_accuracy": _group_mean(right, ids[better], groups).sum() / total,
        "ranking/flat_groups": flat.to(logprobs.dtype).sum() / total,
        "logps/mean": _group_mean(logprobs, ids, groups).sum() / total,
    }
