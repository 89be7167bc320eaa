"""Sample tokens with their log-probabilities."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_fast.rollout.types import Sampling

# Float32 logits processed at once. Beyond 32 MiB glibc returns each block to the kernel, and page faults take
# longer than the softmax.
SLICE = 2**22

Warper = Callable[[Tensor], Tensor]  # (rows, V) float32 -> (rows, V) float32, -inf outside the support


def make_warper(sampling: Sampling) -> Warper | None:
    """Return the function from logits to the logits to sample from; None for greedy sampling."""
    if sampling.temperature == 0:
        return None
    warpers = LogitsProcessorList()
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    warp: Callable[..., Tensor] = warpers
    return lambda logits: warp(None, logits)  # they do not read previous tokens


def draw(logits: Tensor, uniforms: Tensor, warper: Warper | None) -> tuple[Tensor, Tensor]:
    """Sample a token for each row, with its log-probability under the sampling distribution.

    Greedy sampling returns log-probabilities at temperature 1.

    Args:
        logits: (rows, V), any float dtype.
        uniforms: (rows,) float64 in [0, 1).
        warper: from `make_warper`.

    Returns:
        (rows,) int64 tokens and (rows,) float32 log-probabilities.

    Raises:
        FloatingPointError: a row of logits is not a distribution.
    """
    rows = max(1, SLICE // logits.shape[-1])
    slices = zip(logits.split(rows), uniforms.split(rows), strict=True)
    parts = [_draw_slice(part.float(), part_uniforms, warper) for part, part_uniforms in slices]
    tokens, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    if not logprobs.isfinite().all():
        raise FloatingPointError("the model's logits hold NaN or infinity: its weights have likely diverged")
    return tokens, logprobs


def _draw_slice(logits: Tensor, uniforms: Tensor, warper: Warper | None) -> tuple[Tensor, Tensor]:
    # A row that is no distribution gets a NaN log-probability.
    probs = (logits if warper is None else warper(logits)).softmax(-1)
    tokens = logits.argmax(-1) if warper is None else invert_cdf(probs, uniforms)
    return tokens, probs.gather(-1, tokens[:, None])[:, 0].log()


def invert_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverse transform with one uniform per row: (rows, V), (rows,) -> (rows,) int64.

    On a CPU `torch.multinomial`, with V exponentials per row, takes longer than a small model's head. In
    float32 the rounding of a cumulative sum would exceed most probabilities.
    """
    cdf = probs.cumsum(-1, dtype=torch.float64)
    target = uniforms[:, None] * cdf[:, -1:]
    last = cdf[:, -1:].nextafter(cdf.new_zeros(()))  # rounding may move the target to the end
    # The first entry above the target never has zero probability. Only with NaN there is none.
    tokens = torch.searchsorted(cdf, torch.minimum(target, last), right=True)
    return tokens[:, 0].clamp(max=probs.shape[-1] - 1)


def uniforms_of(sampling: Sampling, rows: int) -> Tensor:
    """Return (`max_completion_length`, rows) float64 in [0, 1) from the seed, one for each token."""
    generator = torch.Generator().manual_seed(any_seed(sampling))
    return torch.rand(sampling.max_completion_length, rows, generator=generator, dtype=torch.float64)


def any_seed(sampling: Sampling) -> int:
    """Return the seed, or a new one that does not depend on global state."""
    return secrets.randbits(63) if sampling.seed is None else sampling.seed


def seeded(sampling: Sampling, *place: int) -> Sampling:
    """Return the sampling with a seed derived for this place, if it has one."""
    return replace(sampling, seed=None if sampling.seed is None else derive_seed(sampling.seed, *place))


def derive_seed(seed: int, *place: int) -> int:
    """Derive a seed in [0, 2^63) for one place: a prompt and a number, or a micro-batch.

    With equal seeds vLLM would sample the same completion for a whole group.
    """
    return random.Random(f"{seed} {' '.join(map(str, place))}").getrandbits(63)
