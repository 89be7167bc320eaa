"""Does vLLM compute what the policy computes, read what its tokenizer writes, and survive its own sleep?

Asked when the engine starts, with one short text. vLLM's sleep restores parameters' addresses and registered
buffers; a tensor that a model keeps as a plain attribute in dropped memory comes back as garbage, and
nothing but the output tells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_fast.policy.architecture import own_logits, random_tokens, rounding_nats
from grpo_fast.rollout.transformers import evaluation_mode
from grpo_fast.rollout.vllm.weights import storage_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_fast.policy import Policy

PROBE_LENGTH = 16
COMPARED_TOKENS = 2000  # of two tokenizers


def probe_tokens(policy: Policy) -> list[int]:
    """A text that is the same everywhere and always."""
    return random_tokens(policy.base_model, PROBE_LENGTH, torch.Generator().manual_seed(0)).tolist()


def agree(first: Tensor, second: Tensor, model: PreTrainedModel) -> bool:
    """Whether two (T,) log-probabilities of one text differ by rounding alone; NaN differs."""
    return float((first - second).abs().mean()) <= rounding_nats(model.dtype, model.device.type)


@torch.no_grad()
def require_agreement(policy: Policy, tokens: Sequence[int], logprobs: Tensor) -> float:
    """Mean nats between vLLM's `logprobs` (T - 1,) of T tokens but the first and the policy's.

    Raises ValueError where vLLM computes something else than the policy.
    """
    with evaluation_mode(policy.model):
        logits = policy.run(lambda: own_logits(policy.base_model, tokens))[:-1].cpu()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    apart = float((logprobs - expected).abs().mean())
    if not agree(logprobs, expected, policy.base_model):
        raise ValueError(
            f"vLLM computes other log-probabilities for {type(policy.base_model).__name__} than the policy "
            f"does, by {apart:.2g} nats; its implementation of the model differs, or its reload of the "
            "weights is not exact: set rollout.engine to transformers"
        )
    return apart


def require_same_tokenizer(ours: Any, theirs: Any) -> None:
    """Raises ValueError where vLLM, which finds stop strings, made another tokenizer of the same files."""
    ids = list(range(min(len(ours), COMPARED_TOKENS)))
    if ours.decode(ids) != theirs.decode(ids):
        raise ValueError(
            f"vLLM reads the tokenizer's files as {type(theirs).__name__}, which decodes differently from "
            f"the policy's {type(ours).__name__} and would miss rollout.stop; leave stop out, or set "
            "rollout.engine to transformers"
        )


def unregistered_tensors(model: nn.Module, *, without: Collection[int] = ()) -> list[Tensor]:
    """Tensors, each memory once, that modules or their objects keep unregistered, `without` some storages."""
    found: dict[int, Tensor] = {}
    known = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}.union(without)
    seen: set[int] = set()
    for module in model.modules():
        for tensor in _tensors_in(vars(module), seen):
            if tensor.numel() and storage_of(tensor) not in known:
                found.setdefault(storage_of(tensor), tensor)
    return list(found.values())


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Real ones alone: a compiled model keeps tensors without memory, and its graphs' outputs."""
    if type(value) in (Tensor, nn.Parameter):
        yield value
        return
    if id(value) in seen or isinstance(value, nn.Module):
        return
    seen.add(id(value))
    where = type(value).__module__
    if where.startswith("vllm.") and not where.startswith(("vllm.compilation.", "vllm.config.")):
        value = getattr(value, "__dict__", ())
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, (dict, list, tuple)) else ():
        yield from _tensors_in(item, seen)
