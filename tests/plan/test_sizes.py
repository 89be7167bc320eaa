from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_fast.plan.sizes import StepSizes, largest, largest_micro_batch
from grpo_fast.policy import PackedBatch, pack
from grpo_fast.policy.attention import PackedLayout, visible_pairs
from grpo_fast.table import Completions

SIZES = StepSizes(prompts=5, generations=6, prompt_length=30, completion_length=20, micro_batch_tokens=10**6)


def packed(sizes: StepSizes) -> list[PackedBatch]:
    groups = [group for group in range(sizes.groups) for _ in range(sizes.generations)]
    prompts = [(group,) * sizes.prompt_length for group in groups]
    table = Completions.of(prompts, [(0,) * sizes.completion_length] * len(groups), groups)
    return pack(table, max_tokens=sizes.micro_batch_tokens, device="cpu")


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        replace(SIZES, micro_batch_tokens=400),
        replace(SIZES, micro_batch_tokens=10),
        replace(SIZES, minibatches=2),
        replace(SIZES, completion_length=1),
        StepSizes(1, 1000, prompt_length=8, completion_length=16, micro_batch_tokens=200),
        StepSizes(2, 40, prompt_length=16, completion_length=900, micro_batch_tokens=20_000),
    ],
    ids=str,
)
def test_the_largest_micro_batch_is_the_one_that_pack_makes(
    sizes: StepSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SDPA takes each completion by itself, as it takes long ones; short ones share a call, and a mask.
    monkeypatch.setattr("grpo_fast.policy.attention.PAIRS_A_CALL", -(10**9))
    found = largest_micro_batch(sizes)

    batches = packed(sizes)
    layout = PackedLayout(batches[0], "sdpa")
    masks = [mask for mask in layout.masks(None) if mask is not None]
    pairs = [int(visible_pairs([bounds]).sum()) for bounds in layout.ranges(None)]
    assert (found.inputs, found.targets, found.count, found.documents, found.masked, found.pairs) == (
        len(batches[0].input_ids),
        len(batches[0].targets),
        len(batches),
        sum(not piece.prompt for piece in layout.pieces),
        sum(mask.numel() for mask in masks),
        sum(pairs),
    )
    assert not masks or found.joined * found.sequence == sum(mask.shape[1] for mask in masks)


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
