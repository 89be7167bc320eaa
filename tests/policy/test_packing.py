from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_fast.policy import PackedBatch, Sample, pack


def sample(prompt: int, completion: int, group: int = 0) -> Sample:
    ids = tuple(range(10, 10 + completion))
    return Sample(tuple(range(prompt)), ids, 1.0, group, (1.0,) * completion)


def sizes(batches: list[PackedBatch]) -> list[int]:
    return [len(batch.input_ids) for batch in batches]


def packed(*samples: Sample, max_tokens: int = 10**6) -> dict[str, list]:
    """The only batch's tensors as lists."""
    (batch,) = pack(samples, max_tokens=max_tokens, device="cpu")
    return {name: value.tolist() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}


def test_a_shared_prompt_is_laid_out_once_and_predicts_the_first_token_of_each_completion() -> None:
    batch = packed(sample(3, 2), sample(3, 3))

    assert batch["input_ids"] == [0, 1, 2, 10, 10, 11]
    assert batch["position_ids"] == [0, 1, 2, 3, 3, 4]
    assert batch["segment_ids"] == [0, 0, 0, 1, 2, 2]
    assert batch["cu_seqlens"] == [0, 6]
    assert batch["loss_index"] == [2, 3, 2, 4, 5]
    assert batch["targets"] == [10, 11, 10, 11, 12]
    assert batch["sequence_ids"] == [0, 0, 1, 1, 1]


def test_an_environments_tokens_are_inputs_and_never_targets() -> None:
    turns = replace(
        sample(3, 5),
        sampled=(True, False, False, True, True),
        advantage=(1.0, 9.0, 9.0, 2.0, 3.0),
        sampler_logprobs=(-1.0, 0.0, 0.0, -2.0, -3.0),
    )

    batch = packed(turns, sample(3, 2))

    assert batch["input_ids"] == [0, 1, 2, 10, 11, 12, 13, 10]
    assert batch["loss_index"] == [2, 5, 6, 2, 7]
    assert batch["targets"] == [10, 13, 14, 10, 11]
    assert batch["advantages"] == [1, 2, 3, 1, 1]
    assert batch["sampler_logprobs"] == [-1, -2, -3, 1, 1]
    assert batch["sequence_ids"] == [0, 0, 0, 1, 1]


def test_a_document_is_of_one_group_and_as_long_as_the_budget_lets_it() -> None:
    two_groups = packed(sample(3, 2, 0), sample(3, 3, 1))
    assert two_groups["cu_seqlens"] == [0, 4, 9]
    assert two_groups["position_ids"] == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert two_groups["group_ids"] == [0, 0, 1, 1, 1]
    whole = packed(*[sample(10, 2000)] * 4, max_tokens=10 + 4 * 1999)
    assert whole["cu_seqlens"] == [0, 10 + 4 * 1999]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=25
    ),
    max_tokens=st.integers(1, 120),
)
def test_every_sample_is_packed_once_within_the_budget(
    lengths: list[tuple[int, int, int]], max_tokens: int
) -> None:
    samples = [
        replace(sample(*own), advantage=tuple(number + token / 64 for token in range(own[1])))
        for number, own in enumerate(lengths)
    ]
    samples[0] = replace(samples[0], advantage=-1.0)

    batches = pack(samples, max_tokens=max_tokens, device="cpu")

    found = torch.cat([batch.advantages for batch in batches]).tolist()
    assert sorted(found) == sorted(value for sample in samples for value in sample.token_advantages)
    assert sum(batch.num_sequences for batch in batches) == len(samples)
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
def test_micro_batches_are_as_few_and_as_even_as_they_can_be(
    samples: list[tuple[int, int, int]], budget: int, expected: list[int]
) -> None:
    batches = pack([sample(*own) for own in samples], max_tokens=budget, device="cpu")

    assert sizes(batches) == expected
    assert all(len(batch.cu_seqlens) == 2 for batch in batches if len(batch.input_ids) > budget)


@pytest.mark.parametrize(
    ("samples", "max_tokens", "message"),
    [
        ([], 8, "samples is empty"),
        ([sample(1, 1)], 0, "max_tokens = 0"),
        ([sample(1, 1), sample(0, 1)], 8, r"samples\[1\]\.prompt_ids is empty"),
        ([sample(1, 0)], 8, r"samples\[0\]\.completion_ids is empty"),
        ([replace(sample(1, 2), advantage=(1.0,))], 8, r"advantage has 1 entries for 2 completion tokens"),
        ([replace(sample(1, 2), sampler_logprobs=())], 8, r"sampler_logprobs has 0 entries for 2"),
        (
            [sample(1, 2), replace(sample(1, 2), sampler_logprobs=None)],
            8,
            "sampler_logprobs is None for some",
        ),
    ],
)
def test_bad_input_is_named(samples: list[Sample], max_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(samples, max_tokens=max_tokens, device="cpu")
