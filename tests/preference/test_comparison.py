"""What the losses take of comparisons: every number beside the completion that it belongs to."""

from __future__ import annotations

import torch

from grpo_fast.data import Prompt
from grpo_fast.data.table import CompletionTable
from grpo_fast.objective.pairs import PreferenceTotals
from grpo_fast.preference.comparison import (
    Comparison,
    comparison_table,
    preference_inputs,
    preference_totals,
    ranked_inputs,
)

PROMPT = Prompt(0, "p", (1,), {})
LOGPROBS = -torch.arange(1.0, 5.0)


def scored(comparisons: list[Comparison], *ref_logprobs: float) -> CompletionTable:
    return comparison_table(comparisons).with_facts(ref_logprob=torch.tensor(ref_logprobs))


def ids(*lengths: int) -> tuple[tuple[int, ...], ...]:
    return tuple((7,) * length for length in lengths)


def test_pairs_are_split_into_chosen_and_rejected():
    pairs = [
        Comparison(PROMPT, ids(3, 2), (1.0, 0.0), margin=0.5),
        Comparison(PROMPT, ids(5, 4), (1.0, 0.0), weight=2.0),
    ]
    table = scored(pairs, -5.0, -6.0, -7.0, -8.0)
    totals = preference_totals(table)
    assert totals == PreferenceTotals(num_chosen=2, num_rejected=2, chosen_tokens=8)

    found = preference_inputs(table, LOGPROBS, totals)

    lists = {name: value.tolist() for name, value in vars(found).items() if torch.is_tensor(value)}
    assert lists == {
        **{"chosen_logprobs": [-1, -3], "chosen_lengths": [3, 5], "ref_chosen_logprobs": [-5, -7]},
        **{"rejected_logprobs": [-2, -4], "rejected_lengths": [2, 4], "ref_rejected_logprobs": [-6, -8]},
        **{"margins": [0.5, 0], "weights": [1, 2]},
    }
    plain = preference_inputs(
        comparison_table([Comparison(PROMPT, ids(3, 2), (1.0, 0.0))]), LOGPROBS[:2], totals
    )
    assert plain.margins is plain.weights is plain.ref_chosen_logprobs is plain.ref_rejected_logprobs is None


def test_weights_of_labelled_completions_stand_chosen_first():
    grades, weights = (0.0, 1.0, 0.0, 1.0), (1.0, 2.0, 3.0, 4.0)
    labelled = [Comparison(PROMPT, ids(2), (g,), weight=w) for g, w in zip(grades, weights, strict=True)]
    table = scored(labelled, *(-g for g in grades))
    found = preference_inputs(table, LOGPROBS, preference_totals(table), torch.tensor(0.1))
    assert (found.chosen_logprobs.tolist(), found.rejected_logprobs.tolist()) == ([-2, -4], [-1, -3])
    assert (found.ref_chosen_logprobs.tolist(), found.ref_rejected_logprobs.tolist()) == ([-1, -1], [0, 0])
    assert found.weights.tolist() == [2, 4, 1, 3]


def test_groups_are_flat_with_their_ids_and_what_is_not_recorded_is_nan():
    groups = [
        Comparison(
            PROMPT,
            ids(1, 2, 3),
            (3.0, 2.0, 2.0),
            behaviour_logprobs=(-1.5, None, -2.5),
        ),
        Comparison(PROMPT, ids(4), (0.0,), weight=0.5),
    ]
    found = ranked_inputs(scored(groups, -5, -6, -7, -8), LOGPROBS, 9)
    assert found.logprobs is LOGPROBS and found.ref_logprobs.tolist() == [-5, -6, -7, -8]
    assert (found.lengths.tolist(), found.grades.tolist()) == ([1, 2, 3, 4], [3, 2, 2, 0])
    assert (found.group_ids.tolist(), found.num_groups, found.total_groups) == ([0, 0, 0, 1], 2, 9)
    assert found.weights.tolist() == [1, 0.5]
    ranks = torch.tensor([3.0, 2.0, 2.0])
    expected = (ranks - ranks.mean()) / (ranks.std() + 1e-4)
    torch.testing.assert_close(found.advantages, torch.cat([expected, torch.zeros(1)]))
    assert [None if x != x else x for x in found.behaviour_logprobs.tolist()] == [-1.5, None, -2.5, None]
