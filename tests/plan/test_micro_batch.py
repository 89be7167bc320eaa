from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_fast.plan.micro_batch import largest_micro_batch, step_bytes, whole_group
from grpo_fast.plan.setup import Workload
from grpo_fast.policy import PackedBatch, Sample, pack

WORK = Workload(prompts=5, generations=6, prompt_length=30, completion_length=20, micro_batch_tokens=10**6)


def packed(work: Workload, *, share_prompts: bool) -> list[PackedBatch]:
    length = work.completion_length
    samples = [
        Sample(
            prompt_ids=(group,) * work.prompt_length,
            completion_ids=(0,) * length,
            advantage=0.0,
            group_id=group,
            sampler_logprobs=(0.0,) * length,
        )
        for group in range(-(-work.prompts // work.minibatches))
        for _ in range(work.generations)
    ]
    return pack(samples, max_tokens=work.micro_batch_tokens, share_prompts=share_prompts, device="cpu")


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, {"micro_batch_tokens": 400}, {"micro_batch_tokens": 10}, {"minibatches": 2}]
)
def test_the_largest_micro_batch_is_the_one_that_pack_makes(
    changes: dict[str, int], share_prompts: bool
) -> None:
    work = replace(WORK, **changes)

    found = largest_micro_batch(work, share_prompts=share_prompts)

    batches = packed(work, share_prompts=share_prompts)
    first, lengths = batches[0], batches[0].cu_seqlens.diff()
    assert (found.inputs, found.targets, found.count) == (
        len(first.input_ids),
        len(first.targets),
        len(batches),
    )
    assert found.squares == int(lengths.square().sum())


def test_a_group_far_larger_than_the_budget_is_cut_as_a_part_of_it_is() -> None:
    work = Workload(1, 3000, prompt_length=8, completion_length=16, micro_batch_tokens=200)

    found = largest_micro_batch(work, share_prompts=True)

    batches = packed(work, share_prompts=True)
    assert found.inputs == len(batches[0].input_ids)
    assert found.count == len(batches)


def test_a_whole_group_is_not_cut_by_the_budget() -> None:
    work = replace(WORK, micro_batch_tokens=10)

    found = whole_group(work, share_prompts=False)

    assert (found.inputs, found.groups) == (6 * (30 + 20 - 1), 1.0)


def test_a_step_holds_all_its_packed_batches() -> None:
    batches = packed(WORK, share_prompts=False)
    fields = [value for batch in batches for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    exact = sum(tensor.nbytes for tensor in fields)

    planned = step_bytes(WORK)  # with segments, old and reference log-probabilities, which these do without

    assert exact < planned < 2 * exact
