"""A prompt with completions of known worth, as a row of data and in the table, and what the losses take."""

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
    """A row of data: a pair (the chosen first), one completion with a label, or a ranked group of n."""

    prompt: Prompt
    completion_ids: tuple[tuple[int, ...], ...]  # n, the end token included
    grades: tuple[float, ...]  # n: higher is better, equal is a tie
    margin: float = 0.0  # what the better one's reward must be ahead by
    weight: float = 1.0  # factor of its loss
    columns: Mapping[str, float] = field(default_factory=dict)  # what a custom loss reads
    group_type: str | None = None
    behaviour_logprobs: tuple[float | None, ...] = ()  # n, of the policy that wrote them, summed


def comparison_table(comparisons: Iterable[Comparison]) -> CompletionTable:
    """Each comparison is a group, in order.

    Returns:
        Facts of each completion: `grade` (float64), `behaviour_logprob` (NaN where the data do not say), and
        its group's `margin`, `weight` and columns under `column/NAME`; objects: its group's `group_type`.
    """
    rows = [
        (number, comparison, ids, grade, logprob)
        for number, comparison in enumerate(comparisons)
        for ids, grade, logprob in zip(
            comparison.completion_ids,
            comparison.grades,
            comparison.behaviour_logprobs or (None,) * len(comparison.grades),
            strict=True,
        )
    ]
    told = [math.nan if logprob is None else logprob for *_, logprob in rows]
    return CompletionTable.of(
        [comparison.prompt.token_ids for _, comparison, *_ in rows],
        [ids for _, _, ids, *_ in rows],
        [number for number, *_ in rows],
        facts={
            "grade": torch.tensor([grade for *_, grade, _ in rows], dtype=torch.float64),
            "behaviour_logprob": torch.tensor(told),
            "margin": torch.tensor([comparison.margin for _, comparison, *_ in rows]),
            "weight": torch.tensor([comparison.weight for _, comparison, *_ in rows]),
            **{
                LOSS_COLUMN + name: torch.tensor([comparison.columns[name] for _, comparison, *_ in rows])
                for name in (rows[0][1].columns if rows else ())
            },
        },
        objects={"group_type": [comparison.group_type for _, comparison, *_ in rows]},
    )


def mismatched(comparisons: Sequence[Comparison]) -> CompletionTable:
    """Return each prompt with the completion of the next row, for KTO's reference point.

    Raises:
        ValueError: there is no other row.
    """
    if len(comparisons) < 2:
        raise ValueError(
            "kto needs at least two rows: its reference point pairs prompts with others' completions"
        )
    others = [*comparisons[1:], comparisons[0]]
    pairs = zip(comparisons, others, strict=True)
    return comparison_table(replace(own, completion_ids=other.completion_ids) for own, other in pairs)


def with_order(table: CompletionTable) -> CompletionTable:
    """The groups that have an order: one whose grades all tie agrees with every order.

    Raises:
        ValueError: none is left.
    """
    grades = table.facts["grade"].split(group_sizes(table))
    ordered = [number for number, own in enumerate(grades) if len(own.unique()) > 1]
    if not ordered:
        raise ValueError(
            "evaluation.dataset: all responses of every group tie; there is no order to agree with"
        )
    return table.select_groups(ordered)


def summed_logprobs(table: CompletionTable, annotator: Annotator) -> Tensor:
    """Return (S,) log-probabilities of whole completions under the policy as it is, on the CPU."""
    return table.sums(annotator.columns(table)[0].cpu())


def group_sizes(table: CompletionTable) -> list[int]:
    """Completions of each group; a group's are contiguous."""
    return table.groups.unique_consecutive(return_counts=True)[1].tolist()


def preference_totals(table: CompletionTable) -> PreferenceTotals:
    """Counts over the comparisons of a step."""
    desirable = table.facts["grade"] > 0
    chosen = int(desirable.sum())
    return PreferenceTotals(chosen, len(table) - chosen, int(table.lengths[desirable].sum()))


def preference_inputs(
    table: CompletionTable, logprobs: Tensor, totals: PreferenceTotals, kl: Tensor | None = None
) -> PreferenceInputs:
    """Pairs, or for KTO single completions.

    Args:
        table: P of them.
        logprobs: (S,) of all their completions, in order.
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
    weights = split(table.facts["weight"])  # of a pair both are the same
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
    """Groups of any sizes; arguments as of `preference_inputs`, `total_groups` of the whole step."""
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
