"""Log-probabilities of whole completions, packed so that the completions of a prompt share its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.head import linear_logprob
from grpo_fast.policy import PackedBatch, Policy, Sample, pack


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


def split_requests(requests: Sequence[Request], policy: Policy, max_tokens: int) -> list[list[int]]:
    """Indices of the requests of each micro-batch; the completions of a request stay together."""
    return split_by_tokens([r.num_tokens(shared=policy.shares_prompts) for r in requests], max_tokens)


def pack_requests(requests: Sequence[Request], policy: Policy) -> PackedBatch:
    """One batch; its sequences are the completions in the order given."""
    samples = [
        Sample(
            prompt_ids=request.prompt_ids,
            completion_ids=completion,
            advantages=(0.0,) * len(completion),
            group_id=group_id,
            loss_mask=(True,) * len(completion),
            sampler_logprobs=(0.0,) * len(completion),
        )
        for group_id, request in enumerate(requests)
        for completion in request.completion_ids
    ]
    everything = sum(request.num_tokens(shared=False) for request in requests)
    (batch,) = pack(samples, max_tokens=everything, share_prompts=policy.shares_prompts, device=policy.device)
    return batch


def sequence_logprobs(policy: Policy, batch: PackedBatch) -> Tensor:
    """(S,) float32: log-probability of each sequence, summed over its completion."""
    head = policy.head
    tokens = linear_logprob(
        policy.hidden_states(batch),
        head.weight,
        batch.targets,
        bias=head.bias,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
    ).logprob
    return tokens.new_zeros(batch.num_sequences).index_add(0, batch.sequence_ids, tokens)


@torch.no_grad()
def score(policy: Policy, requests: Sequence[Request], max_tokens: int) -> list[Tensor]:
    """For each request the log-probabilities (n,) of its completions: float32, on the CPU, no gradient."""
    scores: list[Tensor] = [torch.empty(0)] * len(requests)
    for part in split_requests(requests, policy, max_tokens):
        members = [requests[i] for i in part]
        found = sequence_logprobs(policy, pack_requests(members, policy)).cpu()
        for i, own in zip(part, found.split([len(m.completion_ids) for m in members]), strict=True):
            scores[i] = own.clone()
    return scores
