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

from grpo_fast.rollout.vllm.layout import storage_of

if TYPE_CHECKING:
    from grpo_fast.policy import Policy

PROBE_LENGTH = 16
COMPARED_TOKENS = 2000  # of two tokenizers
# Mean nats between two ways of computing the same. float32: vLLM's attention on a GPU may use TF32.
ROUNDING = {torch.float32: 5e-2}
ROUNDING_16_BIT = 0.25


def probe_tokens(vocabulary: int) -> list[int]:
    """A prompt that is the same everywhere and always."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (PROBE_LENGTH,), generator=generator).tolist()


def agree(first: Tensor, second: Tensor, dtype: torch.dtype) -> bool:
    """Whether two (T,) log-probabilities of one text differ by rounding alone; NaN differs."""
    return float((first - second).abs().mean()) <= ROUNDING.get(dtype, ROUNDING_16_BIT)


@torch.no_grad()
def policy_logprobs(policy: Policy, tokens: Sequence[int]) -> Tensor:
    """(T - 1,) float32 on the CPU, of every token but the first."""
    training = [module for module in policy.model.modules() if module.training]
    policy.model.eval()
    try:
        ids = torch.tensor([list(tokens)], device=policy.device)
        logits = policy.base_model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    finally:
        for module in training:
            module.training = True
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()


def require_same_tokenizer(ours: Any, theirs: Any) -> None:
    """vLLM finds stop strings with the tokenizer that it made of the policy's files.

    Raises:
        ValueError: it made another one of them.
    """
    ids = list(range(min(len(ours), COMPARED_TOKENS)))
    if ours.decode(ids) != theirs.decode(ids):
        raise ValueError(
            f"vLLM reads the tokenizer's files as {type(theirs).__name__}, which decodes differently from "
            f"the policy's {type(ours).__name__} and would miss rollout.stop; leave stop out, or set "
            "rollout.engine to transformers"
        )


def loose_tensors(model: nn.Module, *, without: Collection[int] = ()) -> list[Tensor]:
    """Tensors kept as plain attributes of modules and of vLLM's objects in them, each memory once.

    Args:
        without: storages to leave out.
    """
    found: dict[int, Tensor] = {}
    registered = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    seen: set[int] = set()
    for module in model.modules():
        for tensor in _tensors_in(vars(module), seen):
            if tensor.numel() and storage_of(tensor) not in registered and storage_of(tensor) not in without:
                found.setdefault(storage_of(tensor), tensor)
    return list(found.values())


def _tensors_in(value: object, seen: set[int]) -> Iterator[Tensor]:
    """Real ones alone: a compiled model keeps tensors without memory, and its graphs' outputs."""
    if type(value) in (Tensor, nn.Parameter):
        yield value
    elif id(value) not in seen and not isinstance(value, nn.Module):
        seen.add(id(value))
        if isinstance(value, dict):
            for item in value.values():
                yield from _tensors_in(item, seen)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from _tensors_in(item, seen)
        elif _may_hold_weights(type(value).__module__) and hasattr(value, "__dict__"):
            yield from _tensors_in(vars(value), seen)


def _may_hold_weights(module: str) -> bool:
    return module.startswith("vllm.") and not module.startswith(("vllm.compilation.", "vllm.config."))
