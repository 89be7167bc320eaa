from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_fast.data.table import BASELINE, CompletionTable
from grpo_fast.policy import pack

Row = tuple[int, int, int]  # tokens of the prompt and of the completion, and the group


def table_of(*rows):
    return CompletionTable.of(
        [range(prompt) for prompt, _, _ in rows],
        [range(10, 10 + completion) for _, completion, _ in rows],
        [group for _, _, group in rows],
    )


def sizes(batches):
    return [len(batch.input_ids) for batch in batches]


def packed(table, max_tokens=10**6):
    """The only batch's tensors as lists."""
    (batch,) = pack(table, max_tokens=max_tokens, device="cpu")
    tensors = {**vars(batch), **batch.columns}
    return {name: value.tolist() for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def test_a_prompt_is_laid_out_once_and_environments_tokens_are_no_targets():
    table = CompletionTable.of(
        [range(3)] * 2,
        [range(10, 15), range(10, 12)],
        mask=[(True, False, False, True, True), None],
        advantages=[(1.0, 9.0, 9.0, 2.0, 3.0), (1.0, 1.0)],
        sampler_logprobs=[(-1.0, 0.0, 0.0, -2.0, -3.0), (1.0, 1.0)],
    )

    batch = packed(table)

    assert batch["input_ids"] == [0, 1, 2, 10, 11, 12, 13, 10]
    assert batch["position_ids"] == [0, 1, 2, 3, 4, 5, 6, 3]
    assert batch["segment_ids"] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert batch["cu_seqlens"] == [0, 8]
    assert batch["loss_index"] == [2, 5, 6, 2, 7]
    assert batch["targets"] == [10, 13, 14, 10, 11]
    assert batch["advantages"] == [1, 2, 3, 1, 1]
    assert batch["sampler_logprobs"] == [-1, -2, -3, 1, 1]
    assert batch["sequence_ids"] == [0, 0, 0, 1, 1]


def test_a_document_is_of_one_group_and_as_long_as_the_budget_lets_it():
    two_groups = packed(table_of((3, 2, 0), (3, 3, 1)))
    assert two_groups["cu_seqlens"] == [0, 4, 9]
    assert two_groups["position_ids"] == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert two_groups["group_ids"] == [0, 0, 1, 1, 1]
    whole = packed(table_of(*[(10, 2000, 0)] * 4), max_tokens=10 + 4 * 1999)
    assert whole["cu_seqlens"] == [0, 10 + 4 * 1999]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=25
    ),
    max_tokens=st.integers(1, 120),
)
def test_every_sample_is_packed_once_within_the_budget(lengths, max_tokens):
    table = table_of(*lengths)
    table = table.with_columns(place=torch.arange(len(table.token_ids)))

    batches = pack(table, max_tokens=max_tokens, device="cpu")

    found = torch.cat([batch.columns["place"] for batch in batches])
    assert found.sort().values.tolist() == [*range(len(table.token_ids))]
    assert all(torch.equal(batch.columns["place"], batch.token_index) for batch in batches)
    assert sorted(row for batch in batches for row in batch.rows.tolist()) == [*range(len(table))]
    for batch in batches:
        assert len(batch.input_ids) <= max_tokens or len(batch.cu_seqlens) == 2
        assert torch.equal(batch.sequence_ids.unique(), torch.arange(batch.num_sequences))
        assert int(batch.cu_seqlens[-1]) == len(batch.input_ids) == len(batch.position_ids)
    within = [size for size in sizes(batches) if size <= max_tokens]
    assert len(within) <= 1 or (len(within) - 1) * max_tokens < 2 * sum(within)


GROUPS_OF_FIVE = [(10, 21, group) for group in range(4) for _ in range(5)]


@pytest.mark.parametrize(
    ("samples", "budget", "expected"),
    [
        ([(10, 1, group) for group in range(12)], 50, [40] * 3),
        ([(n, 1, group) for group, n in enumerate([10, 40, 20, 10, 20, 20])], 50, [40] * 3),
        # Three of five completions fill the budget with their prompt; nobody's spare token is of use.
        (GROUPS_OF_FIVE, 70, [70] * 4 + [50] * 4),
        (GROUPS_OF_FIVE, 71, [70] * 4 + [50] * 4),
        ([(5, 2, 0), (40, 9, 1), (5, 2, 2)], 16, [48, 12]),  # too long for it: first, and alone
    ],
)
def test_micro_batches_are_as_few_and_as_even_as_they_can_be(samples, budget, expected):
    batches = pack(table_of(*samples), max_tokens=budget, device="cpu")

    assert sizes(batches) == expected
    assert all(len(batch.cu_seqlens) == 2 for batch in batches if len(batch.input_ids) > budget)


def test_completions_of_a_prompt_stay_together_on_request():
    """However many they are: as one sequence, they may exceed the budget."""
    batches = pack(table_of(*GROUPS_OF_FIVE), max_tokens=70, device="cpu", whole_groups=True)
    assert sizes(batches) == [10 + 5 * 20] * 4
    assert [len(batch.cu_seqlens) for batch in batches] == [2] * 4
    assert len(pack(table_of(*GROUPS_OF_FIVE), max_tokens=220, device="cpu", whole_groups=True)) == 2
    # Prompts 0 and 2 share a baseline, and so do 1 and 3; each completion may also be a row of its own.
    shared = table_of(*GROUPS_OF_FIVE)
    shared = shared.with_facts(**{BASELINE: shared.groups % 2})
    for packs in (True, False):
        found = pack(shared, max_tokens=70, device="cpu", whole_groups=True, shares_prompts=packs)
        assert [{*(shared.groups[batch.rows] % 2).tolist()} for batch in found] == [{0}, {1}]
        assert [{*batch.group_ids.tolist()} for batch in found] == [{0}, {0}]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="the table is empty"):
        pack(table_of((1, 1, 0))[:0], max_tokens=8, device="cpu")
    with pytest.raises(ValueError, match="max_tokens = 0"):
        pack(table_of((1, 1, 0)), max_tokens=0, device="cpu")
