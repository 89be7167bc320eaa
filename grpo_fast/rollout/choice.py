"""Which way of decoding serves a model: the first that is seen to give the model's own logits."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_fast.policy.architecture import distance, own_logits, random_tokens, rounding
from grpo_fast.policy.out_of_memory import is_out_of_memory
from grpo_fast.rollout.decoder import EvenDecoder, ExpandedDecoder, RecomputedDecoder
from grpo_fast.rollout.shared_prefix import WORTH_SHARING, HybridDecoder, SharedPrefixDecoder

logger = logging.getLogger(__name__)

WAYS = (SharedPrefixDecoder, HybridDecoder, ExpandedDecoder, EvenDecoder, RecomputedDecoder)
"""The cheapest first."""
_STEPS = 8  # tokens of a trial's completions


@torch.no_grad()
def fitting_decoder(model: PreTrainedModel) -> type[ExpandedDecoder]:
    """The first of `WAYS` whose logits of a short draw are the model's own.

    Leaves the model with the attention of one of them.

    Raises:
        ValueError: not even those of whole sequences, computed again for each token, are.
    """
    attention, problems = model.config._attn_implementation, list[str]()
    for way in filter(lambda way: way.supports(model), WAYS):
        set_attention(model, attention)
        problem = _trial(model, way)
        if problem is None:
            if problems:
                reasons = "; then ".join(dict.fromkeys(problems))
                logger.warning("%s: %s: %s", type(model).__name__, way.cost, reasons)
            return way
        problems.append(problem)
    raise ValueError(
        f"{type(model).__name__} cannot be sampled: {problems[-1]} where whole sequences are computed again; "
        "use rollout.engine = vllm, or another model"
    )


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Models that compute attention by themselves do not take even the name that they have."""
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)


def _trial(model: PreTrainedModel, way: type[ExpandedDecoder]) -> str | None:
    """What is wrong with this way's logits of two prompts and three completions; None: nothing."""
    drawn = random_tokens(model, 2 * WORTH_SHARING + 3 * _STEPS, torch.Generator().manual_seed(0))
    beginning, *rows = drawn.split([2 * WORTH_SHARING, *[_STEPS] * 3])
    # What both begin with is long enough to be read apart, and one is padded where prompts may be.
    one, other = beginning[:-3].tolist(), [*beginning[: -6 if way.pads else -4].tolist(), int(beginning[0])]
    half = _STEPS // 2
    lengths = [_STEPS, half, _STEPS]  # the second completion ends early
    own = [
        own_logits(model, prompt + row[: length - 1].tolist())[len(prompt) - 1 :]
        for prompt, row, length in zip([one, one, other], rows, lengths, strict=True)
    ]
    allowed = rounding(model, one)
    try:
        found = _drawn_logits(model, way, [one, other], torch.stack(rows).to(model.device))
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        return str(failure) or type(failure).__name__
    errors = [distance(*pair) for pair in zip(found.split(1), torch.cat(own).split(1), strict=True)]
    # Of each half of a completion the median: in 16 bits a router's choice may flip at any single token.
    error = max(sorted(errors[at : at + half])[(half - 1) // 2] for at in range(0, len(errors), half))
    return None if error <= allowed else f"its logits are {error:.2g} of their norm off"


def _drawn_logits(
    model: PreTrainedModel, way: type[ExpandedDecoder], prompts: list, tokens: Tensor
) -> Tensor:
    """(T, V) float32, row by row: of each row of `tokens` (3, n), of the second one for half of them."""
    decoder = way(model, tokens.shape[1])
    set_attention(model, decoder.attention)
    half, device = tokens.shape[1] // 2, tokens.device
    logits = [decoder.prefill(prompts, torch.tensor([0, 0, 1], device=device))]
    logits += [decoder.step(tokens[:, at]) for at in range(half - 1)]
    decoder.keep(stay := torch.tensor([0, 2], device=device))
    rest = [decoder.step(tokens[stay, at]) for at in range(half - 1, tokens.shape[1] - 1)]
    first, later = torch.stack(logits, 1).float(), torch.stack(rest, 1).float()
    return torch.cat([first[0], later[0], first[1], first[2], later[1]])
