from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_fast.data.table import CompletionTable
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.policy import PackedBatch, pack


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
def test_no_micro_batch_that_pack_makes_is_larger_than_planned(sizes: StepSizes) -> None:
    planned, batches = sizes.micro_batch, packed(sizes)

    inputs = max(len(batch.input_ids) for batch in batches)
    targets = max(len(batch.targets) for batch in batches)
    assert inputs <= planned.inputs <= max(sizes.micro_batch_tokens, sizes.sequence_length)
    assert targets <= planned.targets
    if sizes.micro_batch_tokens > 10 * sizes.generations * sizes.sequence_length:  # no waste at a batch's end
        assert planned.inputs <= 1.2 * inputs
