"""The DPO family: losses of chosen and rejected completions.

A score is log π_θ(y|x), minus log π_ref(y|x) where the loss has a reference, per token where it averages.
Most losses are functions of z = β (chosen score − rejected score) − margin. The margin is the offset of ODPO
(arXiv 2402.10571), in units of the reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from grpo_fast.config.lookup import load_once
from grpo_fast.objective.comparisons import PreferenceFacts, PreferenceLossConfig, label_of
from grpo_fast.objective.types import LossOutputs, check_custom, present


@dataclass(frozen=True)
class PreferenceTotals:
    """Counts over a whole optimizer step, so that its micro-batches' losses add up to the step's loss."""

    num_chosen: int  # sequences
    num_rejected: int
    chosen_tokens: int  # completion tokens of the chosen sequences


@dataclass(frozen=True)
class PreferenceInputs:
    """One micro-batch: C chosen and R rejected completions, one entry per sequence.

    Pair i is chosen[i] and rejected[i], so C = R, except for KTO, which has no pairs.
    """

    chosen_logprobs: Tensor  # (C,) float, differentiable: log π_θ(y | x), summed over the completion
    rejected_logprobs: Tensor  # (R,) the same
    chosen_lengths: Tensor  # (C,) completion tokens
    rejected_lengths: Tensor  # (R,)
    ref_chosen_logprobs: Tensor | None = None  # (C,) of the reference model; needed by most losses
    ref_rejected_logprobs: Tensor | None = None  # (R,)
    margins: Tensor | None = None  # (C,) required lead of the chosen reward, detached; None: 0
    weights: Tensor | None = None  # (C,) factors of a pair's loss; KTO: (C + R,), the chosen first; None: 1
    kl: Tensor | None = None  # () KTO's reference point, `kto_reference_point` of the whole step
    totals: PreferenceTotals | None = None  # None: this micro-batch is the whole step
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # (C,) each: `columns` of the configuration


def preference_loss(inputs: PreferenceInputs, config: PreferenceLossConfig) -> LossOutputs:
    """Compute the weighted sum of the configured losses, each a mean over pairs (KTO: over completions).

    The metrics `rewards/*` are those of the first loss. ValueError for a missing input, or unread margins.
    """
    _check(inputs, config)
    totals = inputs.totals or PreferenceTotals(
        len(inputs.chosen_logprobs), len(inputs.rejected_logprobs), int(inputs.chosen_lengths.sum())
    )
    examples = max(1, totals.num_chosen if config.paired else totals.num_chosen + totals.num_rejected)
    scored = [_scored(facts, inputs, present(config.beta), totals) for facts in config.facts]
    loss, metrics = inputs.chosen_logprobs.new_zeros(()), _metrics(scored[0], config)
    for (name, weight), s in zip(config.objectives, scored, strict=True):
        losses = FORMULAS[name](s, config) if name in FORMULAS else _custom(name, s)
        if inputs.weights is not None:
            losses = losses * inputs.weights.detach()
        part = losses.sum() / examples
        loss = loss + weight * part
        if len(scored) > 1:
            metrics[f"loss/{label_of(name)}"] = part.detach()
    return LossOutputs(loss, metrics)


def kto_reference_point(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KTO's z₀, KL(π_θ ‖ π_ref), from (K,) completions paired with other prompts.

    It is clamped at zero and has no gradient, as in the paper.
    """
    return (logprobs - ref_logprobs).detach().mean().clamp(min=0)


# --------------------------------------------------------------------------------- formulas: (C,) per pair


@dataclass(frozen=True)
class PairScores:
    """Input of a loss, also of a custom one, which returns (C,) losses."""

    chosen: Tensor  # (C,) scores; for a custom loss the log-ratios to the reference, summed over tokens
    rejected: Tensor  # (R,)
    beta: float
    inputs: PreferenceInputs
    totals: PreferenceTotals

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """Numeric columns of the pairs' rows by name, (C,) each."""
        return self.inputs.columns

    @property
    def margin(self) -> Tensor:
        """The margins (C,), or zero ()."""
        return self.chosen.new_zeros(()) if self.inputs.margins is None else self.inputs.margins.detach()

    @property
    def logits(self) -> Tensor:
        """The log-odds z (C,) that the chosen completion is preferred, minus the margin."""
        return self.beta * (self.chosen - self.rejected) - self.margin


def _smoothed(logits: Tensor, config: PreferenceLossConfig) -> Tensor:
    """Compute the cross-entropy with a label that is wrong with probability `label_smoothing`."""
    flipped = config.label_smoothing
    return -(1 - flipped) * logsigmoid(logits) - flipped * logsigmoid(-logits)


def _robust(s: PairScores, config: PreferenceLossConfig) -> Tensor:
    """Compute an unbiased estimate of the loss without noise, where a share ε of the labels is flipped."""
    z, flipped = s.logits, config.label_smoothing
    return (-(1 - flipped) * logsigmoid(z) + flipped * logsigmoid(-z)) / (1 - 2 * flipped)


def _kto(s: PairScores, config: PreferenceLossConfig) -> Tensor:
    """Compute (C + R,) losses, those of the chosen completions first."""
    kl = present(s.inputs.kl)
    gain, relief = torch.sigmoid(s.beta * (s.chosen - kl)), torch.sigmoid(s.beta * (kl - s.rejected))
    return torch.cat([config.desirable_weight * (1 - gain), config.undesirable_weight * (1 - relief)])


def _orpo(s: PairScores, config: PreferenceLossConfig) -> Tensor:
    """Compute −mean log P(chosen token) − λ log σ(log odds ratio), P the geometric mean over a completion."""
    log_odds = (s.chosen - s.rejected) - (_log1mexp(s.chosen) - _log1mexp(s.rejected))
    return -s.chosen - s.beta * logsigmoid(log_odds - s.margin)


def _cpo(s: PairScores, config: PreferenceLossConfig) -> Tensor:
    preference = _smoothed(s.logits, config)
    return preference + config.cpo_alpha * _sft(s, config) if config.cpo_alpha else preference


def _sft(s: PairScores, config: PreferenceLossConfig) -> Tensor:
    """Compute losses whose mean over pairs is the mean over the step's chosen tokens."""
    return -s.inputs.chosen_logprobs * (s.totals.num_chosen / max(1, s.totals.chosen_tokens))


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 − eˣ) for x ≤ 0, precise at both ends (Mächler 2012) and finite at 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -math.log(2)
    # The branch not taken must be finite too, or its gradient is NaN.
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )


FORMULAS: dict[str, Callable[[PairScores, PreferenceLossConfig], Tensor]] = {
    "sigmoid": lambda s, config: _smoothed(s.logits, config),
    "cdpo": lambda s, config: _smoothed(s.logits, config),
    "robust": _robust,
    # On log-ratios per token: the paper writes sums, its authors' results and TRL use means.
    "ipo": lambda s, config: ((s.logits - 0.5) / s.beta).square(),
    "hinge": lambda s, config: torch.relu(1 - s.logits),
    "kto": _kto,
    "simpo": lambda s, config: _smoothed(s.logits - config.gamma, config),
    "orpo": _orpo,
    "cpo": _cpo,
    "sft": _sft,
}


def custom_loss(path: str) -> Callable[[PairScores], Tensor]:
    """Load a user's function, or raise ValueError."""
    return load_once(path, "preference.loss.loss_type")


def _custom(path: str, s: PairScores) -> Tensor:
    losses = custom_loss(path)(s)
    check_custom(path, losses, tuple(s.chosen.shape), differentiable=s.chosen.requires_grad)
    return losses


# ------------------------------------------------------------------------------ scores, metrics and checks


def _scored(
    facts: PreferenceFacts, inputs: PreferenceInputs, beta: float, totals: PreferenceTotals
) -> PairScores:
    chosen, rejected = inputs.chosen_logprobs, inputs.rejected_logprobs
    if facts.needs_reference:
        chosen = chosen - present(inputs.ref_chosen_logprobs)
        rejected = rejected - present(inputs.ref_rejected_logprobs)
    if facts.averaged:
        chosen, rejected = chosen / inputs.chosen_lengths, rejected / inputs.rejected_lengths
    return PairScores(chosen, rejected, beta, inputs, totals)


def _metrics(s: PairScores, config: PreferenceLossConfig) -> dict[str, Tensor]:
    """Compute metrics named as in TRL, whose rewards are β × score."""
    totals = s.totals
    chosen, rejected = s.beta * s.chosen.detach(), s.beta * s.rejected.detach()
    of_chosen, of_rejected = max(1, totals.num_chosen), max(1, totals.num_rejected)
    metrics = {
        "rewards/chosen": chosen.sum() / of_chosen,
        "rewards/rejected": rejected.sum() / of_rejected,
        "rewards/margins": chosen.sum() / of_chosen - rejected.sum() / of_rejected,
        "logps/chosen": s.inputs.chosen_logprobs.detach().sum() / of_chosen,
        "logps/rejected": s.inputs.rejected_logprobs.detach().sum() / of_rejected,
    }
    ranges = {"chosen": chosen, "rejected": rejected}
    if config.paired:
        metrics["rewards/accuracies"] = (chosen > rejected).to(chosen.dtype).sum() / of_chosen
        ranges["margins"] = chosen - rejected
    else:
        share = (len(chosen) + len(rejected)) / (totals.num_chosen + totals.num_rejected)
        metrics["kl"] = present(s.inputs.kl).detach() * share
    for name, rewards in ranges.items():
        if rewards.numel():
            metrics |= {f"rewards/{name}_min": rewards.amin(), f"rewards/{name}_max": rewards.amax()}
    return metrics


def _check(inputs: PreferenceInputs, config: PreferenceLossConfig) -> None:
    name = f"loss_type = {config.loss_type!r}"
    references = inputs.ref_chosen_logprobs, inputs.ref_rejected_logprobs
    if config.needs_reference and any(reference is None for reference in references):
        raise ValueError(
            f"{name} compares with a reference model: give ref_chosen_logprobs and ref_rejected_logprobs, or "
            "use simpo, orpo or cpo"
        )
    chosen, rejected = len(inputs.chosen_logprobs), len(inputs.rejected_logprobs)
    if config.paired and chosen != rejected:
        raise ValueError(
            f"{name} needs pairs, not {chosen} chosen and {rejected} rejected; use kto for these"
        )
    if not config.paired and inputs.kl is None:
        raise ValueError("kl is None, but kto compares with it: give the step's kto_reference_point")
    if inputs.margins is not None:
        config.check_margins()
