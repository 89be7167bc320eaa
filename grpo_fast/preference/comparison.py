"""A prompt with completions of known worth, and what the losses take of several of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_fast.data.types import Prompt
from grpo_fast.groups.advantages import group_advantages
from grpo_fast.objective.pairs import PreferenceInputs, PreferenceTotals
from grpo_fast.objective.ranking import RankedInputs


@dataclass(frozen=True)
class Comparison:
    """n completions of one prompt: a pair (the chosen first), one with a label, or a ranked group."""

    prompt: Prompt
    completion_ids: tuple[tuple[int, ...], ...]  # n, the end token included
    grades: tuple[float, ...]  # n: higher is better, equal is a tie
    margin: float = 0.0  # what the better one's reward must be ahead by
    weight: float = 1.0  # factor of its loss
    group_type: str | None = None
    behaviour_logprobs: tuple[float | None, ...] = ()  # n, of the policy that wrote them, summed
    mismatched_ids: tuple[int, ...] | None = None  # a completion of another prompt, for KTO's reference point
    ref_logprobs: tuple[float, ...] = ()  # of `sequences` under the reference model; empty: no loss reads it

    @property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """Every completion that the reference model must score."""
        return self.completion_ids + ((self.mismatched_ids,) if self.mismatched_ids else ())

    @property
    def lengths(self) -> tuple[int, ...]:
        """(n,) tokens."""
        return tuple(map(len, self.completion_ids))

    @property
    def num_tokens(self) -> int:
        """Tokens of the completions and of the prompt, which they share."""
        return len(self.prompt.token_ids) + sum(self.lengths)


def with_order(comparisons: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """The comparisons that have an order: a group whose grades all tie agrees with every order.

    Raises:
        ValueError: none is left.
    """
    ordered = tuple(comparison for comparison in comparisons if len(set(comparison.grades)) > 1)
    if not ordered:
        raise ValueError(
            "evaluation.dataset: all responses of every group tie; there is no order to agree with"
        )
    return ordered


def preference_totals(comparisons: Sequence[Comparison]) -> PreferenceTotals:
    """Counts over the comparisons of a step."""
    desirable = _desirable(comparisons)
    chosen = [length for length, good in zip(_lengths(comparisons), desirable, strict=True) if good]
    return PreferenceTotals(len(chosen), len(desirable) - len(chosen), sum(chosen))


def preference_inputs(
    comparisons: Sequence[Comparison], logprobs: Tensor, totals: PreferenceTotals, kl: Tensor | None = None
) -> PreferenceInputs:
    """Pairs, or for KTO single completions.

    Args:
        comparisons: P of them.
        logprobs: (S,) of all their completions, in order.
        totals: of the whole step.
        kl: () KTO's reference point.
    """
    desirable = torch.tensor(_desirable(comparisons), device=logprobs.device)

    def split(values: Tensor) -> tuple[Tensor, Tensor]:
        return values[desirable], values[~desirable]

    chosen, rejected = split(logprobs)
    chosen_lengths, rejected_lengths = split(logprobs.new_tensor(_lengths(comparisons)))
    reference = _reference(comparisons, logprobs)
    ref_chosen, ref_rejected = (None, None) if reference is None else split(reference)
    weights = logprobs.new_tensor([comparison.weight for comparison in comparisons])
    margins = logprobs.new_tensor([comparison.margin for comparison in comparisons])
    return PreferenceInputs(
        chosen_logprobs=chosen,
        rejected_logprobs=rejected,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        ref_chosen_logprobs=ref_chosen,
        ref_rejected_logprobs=ref_rejected,
        margins=margins if margins.any() else None,
        weights=None if (weights == 1).all() else weights if kl is None else torch.cat(split(weights)),
        kl=kl,
        totals=totals,
    )


def ranked_inputs(comparisons: Sequence[Comparison], logprobs: Tensor, total_groups: int) -> RankedInputs:
    """Groups of any sizes; arguments as of `preference_inputs`, `total_groups` of the whole step."""
    device = logprobs.device
    sizes = torch.tensor([len(comparison.completion_ids) for comparison in comparisons], device=device)
    padded = pad_sequence([torch.tensor(c.grades, dtype=torch.float64) for c in comparisons], True, math.nan)
    given = padded.isfinite()
    behaviour = [
        math.nan if logprob is None else logprob  # NaN where the data do not say
        for c in comparisons
        for logprob in c.behaviour_logprobs or (None,) * len(c.completion_ids)
    ]
    return RankedInputs(
        logprobs=logprobs,
        lengths=logprobs.new_tensor(_lengths(comparisons)),
        grades=padded[given].to(device),
        advantages=group_advantages(padded).advantages[given].to(logprobs),
        group_ids=torch.repeat_interleave(torch.arange(len(comparisons), device=device), sizes),
        num_groups=len(comparisons),
        ref_logprobs=_reference(comparisons, logprobs),
        behaviour_logprobs=logprobs.new_tensor(behaviour),
        weights=logprobs.new_tensor([comparison.weight for comparison in comparisons]),
        total_groups=total_groups,
    )


def _lengths(comparisons: Sequence[Comparison]) -> list[int]:
    return [length for comparison in comparisons for length in comparison.lengths]


def _desirable(comparisons: Sequence[Comparison]) -> list[bool]:
    return [grade > 0 for comparison in comparisons for grade in comparison.grades]


def _reference(comparisons: Sequence[Comparison], like: Tensor) -> Tensor | None:
    """(S,) of the completions under the reference model, where the loss has one."""
    if not comparisons[0].ref_logprobs:
        return None
    return like.new_tensor([x for c in comparisons for x in c.ref_logprobs[: len(c.completion_ids)]])
