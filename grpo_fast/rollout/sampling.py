"""Which token comes next, with its log-probability."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_fast.rollout.types import Sampling

BLOCK = 256  # columns of one block of the two-level search in `draw`
SMALL = 1024  # columns: up to here one level takes less time than the calls of a second

# fp32 logits worked on at once. Beyond 32 MiB glibc hands every block back to the kernel, and the page
# faults of the next one cost a CPU more than the softmax.
SLICE = {"cpu": 2**22}
SLICE_ELSEWHERE = 2**26

Warper = Callable[[Tensor], Tensor]  # (rows, V) float32 -> (rows, V) float32, -inf outside the support


def make_warper(sampling: Sampling) -> Warper | None:
    """What turns logits into the distribution to draw from; none when sampling is greedy."""
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
    return lambda logits: warp(None, logits)  # none of these looks at the tokens so far


def draw(logits: Tensor, uniforms: Tensor, warper: Warper | None) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability under the distribution it was drawn from.

    A greedy draw is certain; it reports the log-probability at temperature 1 instead of zero.

    Args:
        logits: (rows, V), any float dtype.
        uniforms: (rows,) float64 in [0, 1).
        warper: from `make_warper`; none takes the most likely token.

    Returns:
        (rows,) int64 tokens and (rows,) float32 log-probabilities.

    Raises:
        FloatingPointError: a row of logits is not a distribution.
    """
    rows = max(1, SLICE.get(logits.device.type, SLICE_ELSEWHERE) // logits.shape[-1])
    slices = zip(logits.split(rows), uniforms.split(rows), strict=True)
    parts = [_draw_slice(part.float(), part_uniforms, warper) for part, part_uniforms in slices]
    tokens, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    if not logprobs.isfinite().all():
        raise FloatingPointError("the model's logits hold NaN or infinity: its weights have likely diverged")
    return tokens, logprobs


def _draw_slice(logits: Tensor, uniforms: Tensor, warper: Warper | None) -> tuple[Tensor, Tensor]:
    """`draw` for a few rows of float32 logits; a row that is no distribution gets a NaN log-probability."""
    probs = (logits if warper is None else warper(logits)).softmax(-1)
    tokens = logits.argmax(-1) if warper is None else invert_cdf(probs, uniforms)
    return tokens, probs.gather(-1, tokens[:, None])[:, 0].log()


def invert_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-transform sampling with one uniform a row: (rows, V), (rows,) -> (rows,) int64.

    `torch.multinomial` draws V exponentials a row, which on a CPU costs more than a small model's head.
    Block sums first, then one block, so that only a sliver is summed up in float64; in float32 the
    rounding of a cumulative sum over V exceeds most tokens' probability. A small vocabulary is one block.
    """
    if probs.shape[-1] <= SMALL:
        cdf = probs.cumsum(-1, dtype=torch.float64)
        return first_above(cdf, uniforms[:, None] * cdf[:, -1:])[:, 0]
    blocks = F.pad(probs, (0, -probs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    cdf = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms[:, None] * cdf[:, -1:]
    block = first_above(cdf, target)
    below = F.pad(cdf, (1, 0)).gather(-1, block)
    rows = torch.arange(len(probs), device=probs.device)
    inner = blocks[rows, block[:, 0]].double().cumsum(-1)
    tokens = block * BLOCK + first_above(inner, target - below)
    return tokens[:, 0].clamp(max=probs.shape[-1] - 1)  # past the end only with NaN, which `draw` reports


def first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """(rows, 1) index of the first entry above `target`: never one of zero probability."""
    last = cdf[:, -1:].nextafter(cdf.new_zeros(()))  # rounding may carry the target to the end
    index = torch.searchsorted(cdf, torch.minimum(target, last), right=True)
    return index.clamp(max=cdf.shape[-1] - 1)


def uniforms_of(sampling: Sampling, rows: int) -> Tensor:
    """(`max_completion_length`, rows) float64 in [0, 1), by the seed: what decides each token."""
    generator = torch.Generator().manual_seed(any_seed(sampling))
    return torch.rand(sampling.max_completion_length, rows, generator=generator, dtype=torch.float64)


def any_seed(sampling: Sampling) -> int:
    """Its seed; where none is given another each time, which no global state decides."""
    return secrets.randbits(63) if sampling.seed is None else sampling.seed


def seeded(sampling: Sampling, *place: int) -> Sampling:
    """With the seed for what is drawn at this place, where there is one."""
    return replace(sampling, seed=None if sampling.seed is None else derive_seed(sampling.seed, *place))


def derive_seed(seed: int, *place: int) -> int:
    """Derive a seed in [0, 2^63) for what is drawn at one place: a prompt and a number, a micro-batch.

    vLLM draws the same noise for requests of one seed, so that equal seeds would make a group of copies.
    """
    return random.Random(f"{seed} {' '.join(map(str, place))}").getrandbits(63)
