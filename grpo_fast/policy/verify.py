"""One look before training: does the packed way through this model compute what the model itself computes?

A model that ignores positions, attends across documents or scales its logits in a way unknown here would
train on wrong gradients without a sign of it. A few short forwards tell.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.policy.attention import LAYER_TYPES
from grpo_fast.policy.packing import Sample, pack
from grpo_fast.policy.policy import Policy

# Lengths are (prompt, completions of its group): a shared prompt, a lone one, and a one-token completion.
_PROBES = ((6, (4, 5)), (7, (3, 1)), (2, (6,)))


def check_layer_types(config: object) -> None:
    """Refuse layers whose state would run from one packed document into the next.

    Raises:
        ValueError: names the layer types.
    """
    config = config.get_text_config()
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if getattr(config, "attention_chunk_size", None):
        unknown.append("chunked_attention")
    if unknown:
        raise ValueError(
            f"model_type = {config.model_type!r} has layers of type {', '.join(unknown)}, which cannot be "
            "packed; use a model whose layers are full or sliding-window attention"
        )


@torch.no_grad()
def verify_policy(policy: Policy) -> None:
    """Compare packed hidden states and head with the model's own logits, sequence by sequence.

    Raises:
        ValueError: they differ by more than rounding.
    """
    training = policy.model.training
    policy.model.eval()
    try:
        samples = _samples(policy.base_model.config.get_text_config().vocab_size)
        (batch,) = pack(samples, max_tokens=10_000, share_prompts=policy.shares_prompts, device=policy.device)
        packed = policy.head.logits(policy.hidden_states(batch))
        alone = torch.cat([_own_logits(policy, sample) for sample in samples])
    finally:
        policy.model.train(training)
    # A softmax does not see a constant, so neither should the comparison.
    packed, alone = (logits - logits.mean(dim=-1, keepdim=True) for logits in (packed, alone))
    error = float((packed - alone).norm() / alone.norm())
    allowed = 1e-3 if policy.head.weight.dtype == torch.float32 else 0.1
    if not error <= allowed:
        raise ValueError(
            f"packed logits of {type(policy.base_model).__name__} differ from the model's own by {error:.2g} "
            f"of their norm ({allowed:.2g} allowed): its attention or its head is not one that packing "
            "understands; use another model or another model.attention"
        )


def _samples(vocab_size: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())

    samples = []
    for group, (prompt_length, lengths) in enumerate(_PROBES):
        prompt = draw(prompt_length)
        for length in lengths:
            samples.append(Sample(prompt, draw(length), 0.0, group, sampler_logprobs=(0.0,) * length))
    return samples


def _own_logits(policy: Policy, sample: Sample) -> Tensor:
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids], device=policy.device)
    logits = policy.base_model(input_ids=ids, use_cache=False).logits[0].float()
    return logits[len(sample.prompt_ids) - 1 : -1]
