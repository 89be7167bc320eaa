"""Check that an engine samples from the policy's distribution.

An engine may treat padding as tokens, compute differently with a cache, or implement a model differently.
Only its log-probabilities show this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_fast.policy.architecture import own_logits, random_tokens, rounding_nats
from grpo_fast.rollout.types import Completion, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (9, 5)  # tokens of the prompts


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn off dropout, and checkpointing, which drops the cache."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def require_agreement(
    model: PreTrainedModel,
    generate: Callable[[list[list[int]], int, Sampling], list[list[Completion]]],
    remedy: str,
    *,
    max_length: int | None = None,
    run: Callable[[Callable[[], Tensor]], Tensor] = lambda work: work(),
) -> float:
    """Return the mean difference in nats between log-probabilities of the engine and the model's forward.

    Args:
        model: the policy's; dtype and device decide the rounding tolerance.
        generate: the engine's.
        remedy: the end of the error message.
        max_length: context length of the engine.
        run: `Policy.run`, for sharded weights.

    Raises:
        ValueError: they differ by more than rounding, or are NaN.
    """
    tokens = random_tokens(model, sum(LENGTHS), torch.Generator().manual_seed(0))
    prompts = [part.tolist() for part in tokens.split(LENGTHS)]
    room = 8 if max_length is None else max_length - max(LENGTHS)
    groups = generate(prompts, 2, Sampling(max_completion_length=max(1, min(8, room)), seed=0))
    apart = []
    with evaluation_mode(model):
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                ids = [*prompt, *completion.token_ids]
                logprobs = run(partial(own_logits, model, ids)).log_softmax(-1).cpu()
                own = logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])[len(prompt) - 1 :, 0]
                apart.append((own - torch.tensor(completion.logprobs)).abs())
    nats = float(torch.cat(apart).mean())
    if not nats <= rounding_nats(model.dtype, model.device.type):
        raise ValueError(
            f"{type(model).__name__} cannot be sampled: the log-probabilities of sampled tokens are "
            f"{nats:.2g} nats from those of the policy's forward; {remedy}"
        )
    return nats
