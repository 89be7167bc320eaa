"""Does vLLM compute what the policy computes, and read what its tokenizer writes?

Checked when the engine starts, with one short text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.policy.architecture import own_logits, random_tokens, rounding_nats
from grpo_fast.rollout.transformers import evaluation_mode

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
def require_agreement(policy: Policy, tokens: Sequence[int], logprobs: Tensor, level: int) -> float:
    """Mean nats between vLLM's `logprobs` (T - 1,) of T tokens but the first and the policy's.

    Raises ValueError where vLLM, whose sleep is of this level, computes something else than the policy.
    """
    with evaluation_mode(policy.model):
        logits = policy.run(lambda: own_logits(policy.base_model, tokens))[:-1].cpu()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    apart = float((logprobs - expected).abs().mean())
    if not agree(logprobs, expected, policy.base_model):
        raise ValueError(
            f"vLLM computes other log-probabilities for {type(policy.base_model).__name__} than the policy "
            f"does, by {apart:.2g} nats; its implementation of the model differs, or its reload of the "
            f"weights is not exact: set {'rollout.vllm.sleep_level to 1, or ' * (level == 2)}"
            "rollout.engine to transformers"
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
