"""From comparisons and the log-probabilities of their completions to what the losses take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fast.objective.pairs import PreferenceInputs, PreferenceTotals
from grpo_fast.objective.ranking import RankedInputs
from grpo_fast.preference.comparison import Comparison


def preference_totals(comparisons: Sequence[Comparison]) -> PreferenceTotals:
    """Counts over the comparisons of a step."""
    lengths, desirable = _lengths(comparisons), _desirable(comparisons)
    return PreferenceTotals(
        num_chosen=sum(desirable),
        num_rejected=len(desirable) - sum(desirable),
        chosen_tokens=sum(n for n, good in zip(lengths, desirable, strict=True) if good),
    )


def preference_inputs(
    comparisons: Sequence[Comparison],
    logprobs: Tensor,
    reference: Tensor | None,
    totals: PreferenceTotals,
    kl: Tensor | None = None,
) -> PreferenceInputs:
    """Pairs, or for KTO single completions.

    Args:
        comparisons: P of them.
        logprobs: (S,) of all their completions, in order.
        reference: (S,) of the reference model.
        totals: of the whole step.
        kl: () KTO's reference point.
    """
    desirable = torch.tensor(_desirable(comparisons), device=logprobs.device)
    lengths = logprobs.new_tensor(_lengths(comparisons))
    weights = logprobs.new_tensor([comparison.weight for comparison in comparisons])
    if kl is not None:
        weights = torch.cat([weights[desirable], weights[~desirable]])
    margins = logprobs.new_tensor([comparison.margin for comparison in comparisons])
    return PreferenceInputs(
        chosen_logprobs=logprobs[desirable],
        rejected_logprobs=logprobs[~desirable],
        chosen_lengths=lengths[desirable],
        rejected_lengths=lengths[~desirable],
        ref_chosen_logprobs=None if reference is None else reference[desirable],
        ref_rejected_logprobs=None if reference is None else reference[~desirable],
        margins=margins if any(comparison.margin for comparison in comparisons) else None,
        weights=weights if any(comparison.weight != 1.0 for comparison in comparisons) else None,
        kl=kl,
        totals=totals,
    )


def ranked_inputs(
    comparisons: Sequence[Comparison], logprobs: Tensor, reference: Tensor | None, total_groups: int
) -> RankedInputs:
    """Groups of any sizes; arguments as `preference_inputs` has them, `total_groups` of the whole step."""
    device = logprobs.device
    sizes = torch.tensor([len(comparison.completion_ids) for comparison in comparisons], device=device)
    grades = [grade for comparison in comparisons for grade in comparison.grades]
    return RankedInputs(
        logprobs=logprobs,
        lengths=logprobs.new_tensor(_lengths(comparisons)),
        grades=torch.tensor(grades, dtype=torch.float64, device=device),
        group_ids=torch.repeat_interleave(torch.arange(len(comparisons), device=device), sizes),
        num_groups=len(comparisons),
        ref_logprobs=reference,
        behaviour_logprobs=logprobs.new_tensor(_behaviour(comparisons)),
        weights=logprobs.new_tensor([comparison.weight for comparison in comparisons]),
        total_groups=total_groups,
    )


def _lengths(comparisons: Sequence[Comparison]) -> list[int]:
    return [len(ids) for comparison in comparisons for ids in comparison.completion_ids]


def _desirable(comparisons: Sequence[Comparison]) -> list[bool]:
    return [grade > 0 for comparison in comparisons for grade in comparison.grades]


def _behaviour(comparisons: Sequence[Comparison]) -> list[float]:
    """NaN where the data do not say."""
    return [
        float("nan") if logprob is None else logprob
        for c in comparisons
        for logprob in c.behaviour_logprobs or (None,) * len(c.completion_ids)
    ]
