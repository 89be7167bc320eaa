"""Log-probabilities of whole completions, packed so that the completions of a prompt share its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from grpo_fast.head import linear_logprob
from grpo_fast.policy import PackedBatch, Policy, Sample, pack
from grpo_fast.policy.out_of_memory import MicroBatchBudget

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """Completions of one prompt."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[tuple[int, ...], ...]

    def num_tokens(self, *, shared: bool = True) -> int:
        """Tokens of the completions and of the prompt, which they share or have one each."""
        prompts = 1 if shared else len(self.completion_ids)
        return prompts * len(self.prompt_ids) + sum(map(len, self.completion_ids))


def split_by_tokens(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices into `sizes` in as few parts as longest-first placement finds, none over the budget.

    An item larger than the budget gets a part of its own: it cannot be cut.
    """
    parts: list[list[int]] = []
    loads: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = next((p for p, load in enumerate(loads) if load + sizes[i] <= max_tokens), None)
        if fitting is None:
            parts.append([i])
            loads.append(sizes[i])
        else:
            parts[fitting].append(i)
            loads[fitting] += sizes[i]
    return [sorted(part) for part in parts]


class RequestBatches(MicroBatchBudget):
    """Splits requests within a budget of tokens; the completions of a request stay together.

    Args:
        configured: tokens of a micro-batch, while the memory holds them.
    """

    def __init__(self, policy: Policy, configured: int) -> None:
        super().__init__(
            unit="one prompt with its completions", remedy="shorten the longest completions of the data"
        )
        self.policy = policy
        self.configured = configured

    def fit(self, requests: Sequence[Request], work: Callable[[list[list[int]]], T]) -> T:
        """What `work` makes of the indices of each micro-batch's requests; see `attempts`.

        Raises:
            torch.OutOfMemoryError: not even the longest request alone fits.
        """
        sizes = [request.num_tokens(shared=self.policy.shares_prompts) for request in requests]
        for attempt in self.attempts():
            with attempt:
                parts = split_by_tokens(sizes, self.tokens(self.configured))
                attempt.sizes(max(sum(sizes[i] for i in part) for part in parts), max(sizes))
                return work(parts)
        raise AssertionError("attempts end with a result or an error")


def pack_requests(requests: Sequence[Request], policy: Policy) -> PackedBatch:
    """One batch; its sequences are the completions in the order given."""
    samples = [
        Sample(
            prompt_ids=request.prompt_ids,
            completion_ids=completion,
            advantage=0.0,
            group_id=group_id,
            sampler_logprobs=(0.0,) * len(completion),
        )
        for group_id, request in enumerate(requests)
        for completion in request.completion_ids
    ]
    everything = sum(request.num_tokens(shared=False) for request in requests)
    (batch,) = pack(samples, max_tokens=everything, share_prompts=policy.shares_prompts, device=policy.device)
    return batch


def sequence_logprobs(policy: Policy, batch: PackedBatch, weight_grad: Tensor | None = None) -> Tensor:
    """(S,) float32: log-probability of each sequence, summed over its completion.

    Args:
        weight_grad: as in `packed_loss`.
    """
    head = policy.head
    tokens = linear_logprob(
        policy.hidden_states(batch),
        head.weight if weight_grad is None else head.weight.detach(),
        batch.targets,
        weight_grad=weight_grad,
        **head.options,
    ).logprob
    return tokens.new_zeros(batch.num_sequences).index_add(0, batch.sequence_ids, tokens)


@torch.no_grad()
def score(requests: Sequence[Request], batches: RequestBatches) -> list[Tensor]:
    """For each request the log-probabilities (n,) of its completions: float32, on the CPU, no gradient."""

    def of_parts(parts: list[list[int]]) -> list[Tensor]:
        scores: list[Tensor] = [torch.empty(0)] * len(requests)
        for part in parts:
            members = [requests[i] for i in part]
            found = sequence_logprobs(batches.policy, pack_requests(members, batches.policy)).cpu()
            for i, own in zip(part, found.split([len(m.completion_ids) for m in members]), strict=True):
                scores[i] = own.clone()
        return scores

    return batches.fit(requests, of_parts)
