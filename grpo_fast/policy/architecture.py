"""What packing and the loss must know of a model: its kinds of layers, its head, and whether both are so.

A model that ignores positions, attends across documents or scales its logits in a way unknown here would
train on wrong gradients without a sign of it. A few short forwards before training tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_fast.head import HeadParameters
from grpo_fast.policy.packing import Sample, pack

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from grpo_fast.policy.policy import Policy

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})  # others carry state across documents
# Lengths are (prompt, completions of its group): a shared prompt, a lone one, and a one-token completion.
_PROBES = ((6, (4, 5)), (7, (3, 1)), (2, (6,)))


def check_layer_types(config: PreTrainedConfig) -> None:
    """Refuse layers whose state would run from one packed document into the next.

    Raises:
        ValueError: names the layer types.
    """
    text = config.get_text_config()
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES)
    if getattr(text, "attention_chunk_size", None):
        unknown.append("chunked_attention")
    if unknown:
        raise ValueError(
            f"model_type = {text.model_type!r} has layers of type {', '.join(unknown)}, which cannot be "
            "packed; use a model whose layers are full or sliding-window attention"
        )


def head_parameters(model: PreTrainedModel) -> HeadParameters:
    """Read the head of a transformers causal language model, under the names its configuration uses.

    Raises:
        ValueError: the model has no output embedding, or LoRA wraps it.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head; give a causal language model")
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"the output head is a {type(head).__name__}, not a plain linear layer; leave it out of "
            "model.lora.target_modules"
        )
    config = model.config.get_text_config()
    return HeadParameters(
        weight=head.weight,
        bias=head.bias,
        logit_scale=_logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _logit_scale(config: PreTrainedConfig) -> float:
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        return float(scale)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    # Granite and MiniCPM divide by it, HyperCLOVA X multiplies.
    return float(scaling) if config.model_type.startswith("hyperclovax") else 1.0 / float(scaling)


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
        samples += [Sample(prompt, draw(length), 0.0, group, (0.0,) * length) for length in lengths]
    return samples


def _own_logits(policy: Policy, sample: Sample) -> Tensor:
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids], device=policy.device)
    logits: Any = policy.base_model(input_ids=ids, use_cache=False).logits
    return logits[0, len(sample.prompt_ids) - 1 : -1].float()
