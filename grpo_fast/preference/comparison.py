"""Comparisons: completions of a prompt with grades, as rows and as a table, and the inputs of the losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_fast.data.table import CompletionTable
from grpo_fast.data.types import Prompt
from grpo_fast.groups.advantages import group_advantages
from grpo_fast.loop.annotate import Annotator
from grpo_fast.loop.columns import LOSS_COLUMN
from grpo_fast.objective.pairs import PreferenceInputs, PreferenceTotals
from grpo_fast.objective.ranking import RankedInputs


@dataclass(frozen=True)
class Comparison:
    """A pair (the chosen first), one completion with a label, or a ranked group; n completions in all."""

    prompt: Prompt
    completion_ids: tuple[tuple[int, ...], ...]  # n, with the end token
    grades: tuple[float, ...]  # n, higher is better, equal is a tie
    margin: float = 0.0  # minimum gap between the rewards
    weight: float = 1.0  # factor of the loss
    columns: Mapping[str, float] = field(default_factory=dict)  # for a custom loss
    group_type: str | None = None
    behaviour_logprobs: tuple[float | None, ...] = ()  # n sums, under the policy that wrote the completions


def comparison_table(comparisons: Iterable[Comparison]) -> CompletionTable:
    """Return the table with a group for each comparison, in order.

    Returns:
        Facts of each completion: `grade` (float64), `behaviour_logprob` (NaN where unknown), and its group's
        `margin`, `weight` and columns under `column/NAME`; objects: its group's `group_type`.
    """
    groups = [*comparisons]
    rows = [(number, group) for number, group in enumerate(groups) for _ in group.grades]
    logprobs = [
        math.nan if logprob is None else logprob
        for group in groups
        for logprob in group.behaviour_logprobs or (None,) * len(group.grades)
    ]
    facts = {
        "grade": torch.tensor([grade for group in groups for grade in group.grades], dtype=torch.float64),
        "behaviour_logprob": torch.tensor(logprobs),
        "margin": torch.tensor([group.margin for _, group in rows]),
        "weight": torch.tensor([group.weight for _, group in rows]),
    }
    for name in groups[0].columns if groups else ():
        facts[LOSS_COLUMN + name] = torch.tensor([group.columns[name] for _, group in rows])
    return CompletionTable.of(
        [group.prompt.token_ids for _, group in rows],
        [ids for group in groups for ids in group.completion_ids],
        [number for number, _ in rows],
        facts=facts,
        objects={"group_type": [group.group_type for _, group in rows]},
    )


def mismatched(comparisons: Sequence[Comparison]) -> CompletionTable:
    """Return each prompt with the completion of the next row, for KTO's reference point."""
    if len(comparisons) < 2:
        raise ValueError(
            "kto needs at least two rows: its reference point pairs prompts with others' completions"
        )
    pairs = zip(comparisons, [*comparisons[1:], comparisons[0]], strict=True)
    return comparison_table(replace(row, completion_ids=other.completion_ids) for row, other in pairs)


def with_order(table: CompletionTable) -> CompletionTable:
    """Return the groups that have an order, in which not all grades tie."""
    grades = table.facts["grade"].split(group_sizes(table))
    ordered = [number for number, group in enumerate(grades) if len(group.unique()) > 1]
    if not ordered:
        raise ValueError(
            "evaluation.dataset: all responses of every group tie; there is no order to agree with"
        )
    return table.select_groups(ordered)


def summed_logprobs(table: CompletionTable, annotator: Annotator) -> Tensor:
    """Return the (S,) log-probabilities of whole completions under the current policy, on the CPU."""
    return table.sums(annotator.columns(table)[0].cpu())


def group_sizes(table: CompletionTable) -> list[int]:
    """Return the number of completions of each group, whose completions are contiguous."""
    return table.groups.unique_consecutive(return_counts=True)[1].tolist()


def preference_totals(table: CompletionTable) -> PreferenceTotals:
    desirable = table.facts["grade"] > 0
    chosen = int(desirable.sum())
    return PreferenceTotals(chosen, len(table) - chosen, int(table.lengths[desirable].sum()))


def preference_inputs(
    table: CompletionTable, logprobs: Tensor, totals: PreferenceTotals, kl: Tensor | None = None
) -> PreferenceInputs:
    """Return the inputs of the loss of pairs, or of single completions for KTO.

    Args:
        logprobs: (S,) of the table's completions, in order.
        totals: of the whole step.
        kl: () KTO's reference point.
    """
    desirable = (table.facts["grade"] > 0).to(logprobs.device)

    def split(values: Tensor) -> tuple[Tensor, Tensor]:
        values = values.to(logprobs)
        return values[desirable], values[~desirable]

    chosen, rejected = split(logprobs)
    chosen_lengths, rejected_lengths = split(table.lengths)
    reference = table.facts.get("ref_logprob")
    ref_chosen, ref_rejected = (None, None) if reference is None else split(reference)
    margins, _ = split(table.facts["margin"])
    weights = split(table.facts["weight"])  # equal within a pair
    plain = bool((table.facts["weight"] == 1).all())
    return PreferenceInputs(
        chosen_logprobs=chosen,
        rejected_logprobs=rejected,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        ref_chosen_logprobs=ref_chosen,
        ref_rejected_logprobs=ref_rejected,
        margins=margins if table.facts["margin"].any() else None,
        weights=None if plain else weights[0] if kl is None else torch.cat(weights),
        kl=kl,
        totals=totals,
        columns={
            name.removeprefix(LOSS_COLUMN): split(values)[0]
            for name, values in table.facts.items()
            if name.startswith(LOSS_COLUMN)
        },
    )


def ranked_inputs(table: CompletionTable, logprobs: Tensor, total_groups: int) -> RankedInputs:
    """Return the inputs of the loss of ranked groups; `total_groups` is the number of the whole step."""
    device, sizes = logprobs.device, group_sizes(table)
    padded = pad_sequence([*table.facts["grade"].split(sizes)], True, math.nan)
    given = padded.isfinite()
    reference = table.facts.get("ref_logprob")
    first = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    return RankedInputs(
        logprobs=logprobs,
        lengths=table.lengths.to(logprobs),
        grades=padded[given].to(device),
        advantages=group_advantages(padded).advantages[given].to(logprobs),
        group_ids=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device),
        num_groups=len(sizes),
        ref_logprobs=None if reference is None else reference.to(logprobs),
        behaviour_logprobs=table.facts["behaviour_logprob"].to(logprobs),
        weights=table.facts["weight"][first].to(logprobs),
        total_groups=total_groups,
    )
