"""How large the largest micro-batch of a step is, from `pack` itself on one group."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo_fast.plan.setup import Workload
from grpo_fast.policy import Sample, pack

# Bytes of a packed batch: token, position and segment of every input; of every target its index, id, sequence
# and group, its advantage, sampler's, old and reference log-probability, and the mask.
BYTES_PER_INPUT, BYTES_PER_TARGET = 3 * 8, 4 * 8 + 4 * 4 + 1


@dataclass(frozen=True)
class MicroBatch:
    """Sizes that bytes follow from."""

    inputs: int
    targets: int
    squares: int  # Σ of the documents' squared lengths
    longest: int  # tokens of its longest document
    groups: float  # that it holds
    count: int  # micro-batches of an optimiser step


def largest_micro_batch(work: Workload, *, share_prompts: bool) -> MicroBatch:
    """Of one optimiser step: as even as `pack` makes them, all completions as long as they may be."""
    groups = -(-work.prompts // work.minibatches)
    documents = sorted(_of_group(work, share_prompts) * groups, reverse=True)
    count = _fewest(documents, work.micro_batch_tokens)
    return _sizes(documents[::count], work, count)


def whole_group(work: Workload, *, share_prompts: bool) -> MicroBatch:
    """One group, whatever the budget for a micro-batch."""
    tokens = work.generations * work.sequence_length
    groups = -(-work.prompts // work.minibatches)
    return _sizes(_documents(work.generations, work, tokens, share_prompts), work, groups)


def step_bytes(work: Workload) -> int:
    """Bytes of all packed batches of a step, which are on the device together; prompts count each time."""
    per_completion = BYTES_PER_INPUT * work.sequence_length + BYTES_PER_TARGET * work.completion_length
    return work.completions * per_completion


def _of_group(work: Workload, share_prompts: bool) -> tuple[tuple[int, int], ...]:
    """Documents of one group. A large one repeats the document that its first completions fill."""
    enough = 2 + work.micro_batch_tokens // work.completion_length
    if work.generations <= enough:
        return _documents(work.generations, work, work.micro_batch_tokens, share_prompts)
    full = max(_documents(enough, work, work.micro_batch_tokens, share_prompts))
    number, rest = divmod(work.generations, full[1] // work.completion_length)
    return (full,) * number + (_documents(rest, work, work.micro_batch_tokens, share_prompts) if rest else ())


def _fewest(documents: Sequence[tuple[int, int]], budget: int) -> int:
    """Micro-batches that hold the documents, (inputs, targets) and longest first, within the budget."""
    least = -(-sum(inputs for inputs, _ in documents) // budget)
    for count in range(least, len(documents)):
        if sum(inputs for inputs, _ in documents[::count]) <= budget:
            return count
    return len(documents)


def _sizes(documents: Sequence[tuple[int, int]], work: Workload, count: int) -> MicroBatch:
    targets = sum(found for _, found in documents)
    return MicroBatch(
        inputs=sum(inputs for inputs, _ in documents),
        targets=targets,
        squares=sum(inputs**2 for inputs, _ in documents),
        longest=max(inputs for inputs, _ in documents),
        groups=targets / (work.generations * work.completion_length),
        count=count,
    )


def _documents(
    generations: int, work: Workload, budget: int, share_prompts: bool
) -> tuple[tuple[int, int], ...]:
    return _cut(generations, work.prompt_length, work.completion_length, budget, share_prompts)


@functools.lru_cache(maxsize=256)
def _cut(
    generations: int, prompt: int, completion: int, budget: int, share_prompts: bool
) -> tuple[tuple[int, int], ...]:
    """(inputs, targets) of each document that the completions of one prompt are packed into."""
    sample = Sample(
        prompt_ids=(0,) * prompt,
        completion_ids=(0,) * completion,
        advantage=0.0,
        group_id=0,
        sampler_logprobs=(0.0,) * completion,
    )
    batches = pack([sample] * generations, max_tokens=budget, share_prompts=share_prompts, device="cpu")
    documents: list[tuple[int, int]] = []
    for batch in batches:
        owner = torch.bucketize(batch.loss_index, batch.cu_seqlens[1:], right=True)
        targets = owner.bincount(minlength=len(batch.cu_seqlens) - 1)
        documents += zip(batch.cu_seqlens.diff().tolist(), targets.tolist(), strict=True)
    return tuple(documents)
