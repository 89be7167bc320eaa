from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_fast.data.table import CompletionTable
from grpo_fast.plan.sizes import StepSizes, largest, largest_micro_batch
from grpo_fast.policy import PackedBatch, pack
from grpo_fast.policy.layout import PackedLayout, visible_pairs

SIZES = StepSizes(prompts=5, generations=6, prompt_length=30, completion_length=20, micro_batch_tokens=10**6)


def packed(sizes: StepSizes) -> list[PackedBatch]:
    groups = [group for group in range(sizes.groups) for _ in range(sizes.generations)]
    prompts = [(group,) * sizes.prompt_length for group in groups]
    table = CompletionTable.of(prompts, [(0,) * sizes.completion_length] * len(groups), groups)
    return pack(table, max_tokens=sizes.micro_batch_tokens, device="cpu")


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.builds(
        StepSizes,
        prompts=st.integers(1, 6),
        generations=st.integers(2, 12),
        prompt_length=st.integers(1, 40),
        completion_length=st.integers(1, 40),
        micro_batch_tokens=st.integers(1, 600),
        minibatches=st.integers(1, 2),
    )
)
def test_the_largest_micro_batch_is_the_one_that_pack_makes(sizes: StepSizes) -> None:
    """SDPA takes each completion by itself, as it takes long ones; short ones share a call, and a mask."""
    found, batches = largest_micro_batch(sizes), packed(sizes)

    with patch("grpo_fast.policy.layout.PAIRS_A_CALL", -(10**9)):
        layout = PackedLayout(batches[0], "sdpa")
        masks = [mask for mask in layout.masks(None) if mask is not None]
    pairs = [int(visible_pairs([bounds]).sum()) for bounds in layout.ranges(None)]
    assert (found.inputs, found.targets, found.count, found.documents, found.pairs) == (
        len(batches[0].input_ids),
        len(batches[0].targets),
        len(batches),
        len(batches[0].cu_seqlens) - 1,
        sum(pairs),
    )
    if sizes.completion_length > 1:  # else a completion has no inputs of its own
        assert found.masked == sum(mask.numel() for mask in masks)


def test_a_step_of_many_documents_is_planned_by_a_part_of_them() -> None:
    many = StepSizes(64, 30, prompt_length=16, completion_length=20, micro_batch_tokens=100)

    found, batches = largest_micro_batch(many), packed(many)

    assert found.inputs == len(batches[0].input_ids)
    assert found.count == pytest.approx(len(batches), rel=0.02)


def test_a_step_holds_all_its_packed_batches() -> None:
    batches = packed(SIZES)
    fields = [value for batch in batches for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    exact = sum(tensor.nbytes for tensor in fields)

    planned = SIZES.packed_bytes  # with segments, old and reference log-probabilities, which these do without

    assert exact < planned < 2 * exact


@given(low=st.integers(1, 50), more=st.integers(0, 5000), last=st.integers(0, 6000))
def test_the_largest_is_the_last_that_fits(low: int, more: int, last: int) -> None:
    high = low + more

    found = largest(low, high, lambda size: size <= last)

    assert found == (None if last < low else min(last, high))
