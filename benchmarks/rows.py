"""Where a batch's rows come from: made, taken from a model, or made to match a model's live tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .accuracy import exact_logprobs
from .live_tiles import TILE, Histogram, count_live, row_chunks
from .measure import cache_bytes
from .problem import DPO, DTYPES, FORWARD_BACKWARD, GRPO, Problem, Setting, old_and_reference

KINDS = ("flat", "peaked", "real", "histogram")
_FLAT_SPREAD, _PEAKED_SPREAD = 1.0, 2.5  # standard deviation of the logits
_PEAKS = (10.0, 25.0)  # range of what a peaked row's target stands out by
_MOST_PROBLEMS = 8
_HIGHEST_PEAK, _BISECTIONS = 80.0, 16
_CANDIDATES, _MEAN_GAP = 5, 3.0  # raised entries of a row, and nats from one to the next on average
_MODEL_SPREAD, _TILE_SHARE = 4.0, 0.25
"""Of the other logits of a row made to match a model: standard deviation, and the part of their variance that
the entries of a tile have in common. Chosen on 320 rows of Qwen2.5-Coder-1.5B: with 2.5 and none, as many
tiles hold a probability above 1e-5, but 28-32 % instead of 11 % one above 1e-6, and the certified backward
visits 8-15 % instead of 2 %."""


@dataclass(frozen=True)
class RealRows:
    """A model's own rows, on the CPU."""

    name: str
    hidden: Tensor  # (M, H) after the last norm
    targets: Tensor  # (M,) int64, the tokens that were sampled there
    weight: Tensor  # (V, H) the model's head


@dataclass(frozen=True)
class Sources:
    """What `real` and `histogram` rows are made from, where given."""

    real: RealRows | None = None
    histogram: Histogram | None = None

    def describe(self, setting: Setting) -> str:
        """One line to print beside the numbers."""
        if setting.rows == "real":
            return f"{len(self.real.hidden):,} rows of {self.real.name}, drawn with replacement"
        if setting.rows == "histogram":
            of = self.histogram
            scaled = "" if of.vocabulary == setting.vocabulary else f", scaled from V {of.vocabulary:,}"
            return (
                f"random rows made to have the live tiles of {of.source} (tiles with a probability above "
                f"{of.threshold:g}: {of.density:.2%}{scaled})"
            )
        spread = (
            f"logits of standard deviation {_FLAT_SPREAD if setting.rows == 'flat' else _PEAKED_SPREAD:g}"
        )
        peak = "" if setting.rows == "flat" else f", targets raised by {_PEAKS[0]:g} to {_PEAKS[1]:g}"
        return f"random rows, {spread}{peak}"


def load_real_rows(path: Path) -> RealRows:
    """Reads a safetensors file with `hidden` (M, H), `target` (M,) int64 and `weight` (V, H), the head.

    Raises:
        ValueError: a tensor is missing or does not fit the others.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            source = (file.metadata() or {}).get("source", path.stem)
    except Exception as error:
        raise ValueError(f"--real-rows {path} cannot be read as safetensors: {error}") from error
    missing = [name for name in ("hidden", "target", "weight") if name not in tensors]
    if missing:
        raise ValueError(
            f"--real-rows {path} holds {sorted(tensors)} but no {', '.join(missing)}; "
            "`python -m benchmarks rows` writes such files (without --no-head)"
        )
    hidden, targets, weight = tensors["hidden"], tensors["target"].long(), tensors["weight"]
    if hidden.shape[0] != targets.shape[0] or hidden.shape[1] != weight.shape[1] or not len(hidden):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise ValueError(f"--real-rows {path}: shapes {shapes} are not (M, H), (M,) and (V, H)")
    if int(targets.min()) < 0 or int(targets.max()) >= weight.shape[0]:
        raise ValueError(f"--real-rows {path}: targets must lie in [0, {weight.shape[0]})")
    return RealRows(source, hidden, targets, weight)


def make_problems(setting: Setting, sources: Sources, device: torch.device, seed: int) -> list[Problem]:
    """Batches that differ, so many that who takes them in turn finds none of its inputs in the cache."""
    first = make_problem(setting, sources, device, seed)
    count = min(_MOST_PROBLEMS, 1 + 2 * cache_bytes(device) // first.input_bytes)
    return [first, *(make_problem(setting, sources, device, seed + n) for n in range(1, count))]


def make_problem(setting: Setting, sources: Sources, device: torch.device, seed: int) -> Problem:
    """A batch of the setting; another seed gives other rows and another place in memory.

    Raises:
        ValueError: a batch for DPO that cannot be halved.
    """
    if setting.loss == DPO and setting.tokens % 2:
        raise ValueError(
            f"DPO compares one half of the batch with the other: {setting.tokens} tokens are odd"
        )
    generator = torch.Generator(device).manual_seed(seed)
    hidden, weight, targets = _rows(setting, sources, device, generator)
    sequences = math.gcd(setting.tokens, 16)
    advantages = torch.randn(sequences, device=device, generator=generator)
    advantages = torch.where(advantages < 0, advantages - 0.1, advantages + 0.1)
    old = reference = None
    if setting.loss == GRPO:
        logprobs, _ = exact_logprobs(hidden, weight, targets, torch.float32)
        old, reference = old_and_reference(logprobs, generator)
    backward = setting.mode == FORWARD_BACKWARD
    return Problem(
        hidden=hidden.requires_grad_(backward),
        weight=weight.requires_grad_(backward and setting.trainable),
        targets=targets,
        advantages=advantages.repeat_interleave(setting.tokens // sequences),
        sequences=sequences,
        backward=backward,
        loss=setting.loss,
        old_logprobs=old,
        ref_logprobs=reference,
    )


def _rows(
    setting: Setting, sources: Sources, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = DTYPES[setting.dtype]
    if setting.rows == "real":
        real = sources.real
        index = torch.randint(len(real.hidden), (setting.tokens,), device=device, generator=generator).cpu()
        return (
            real.hidden[index].to(device, dtype),
            real.weight.to(device, dtype, copy=True),
            real.targets[index].to(device),
        )
    kind = {"device": device, "generator": generator}
    weight = torch.randn(setting.vocabulary, setting.hidden, dtype=dtype, **kind) / setting.hidden**0.5
    targets = torch.randint(setting.vocabulary, (setting.tokens,), **kind)
    noise = torch.randn(setting.tokens, setting.hidden, dtype=dtype, **kind)
    if setting.rows == "flat":
        return noise * _FLAT_SPREAD, weight, targets
    if setting.rows == "peaked":
        low, high = _PEAKS
        peak = (low + (high - low) * torch.rand(setting.tokens, 1, **kind)).to(dtype)
        return noise.mul_(_PEAKED_SPREAD).add_(peak * weight[targets]), weight, targets
    on_cpu = torch.Generator().manual_seed(generator.initial_seed())
    wanted = sources.histogram.draw(setting.tokens, setting.vocabulary, on_cpu).to(device)
    weight = _alike_within_tiles(weight, generator)
    hidden, targets = _with_live_tiles(noise.mul_(_MODEL_SPREAD), weight, wanted, generator)
    return hidden, weight, targets


def _alike_within_tiles(weight: Tensor, generator: torch.Generator) -> Tensor:
    """(V, H) of the same size, whose rows share a part with those of their tile: likely words come in
    clusters."""
    vocabulary, depth = weight.shape
    kind = {"dtype": weight.dtype, "device": weight.device, "generator": generator}
    common = torch.randn(-(-vocabulary // TILE), depth, **kind) * (_TILE_SHARE / depth) ** 0.5
    return (1 - _TILE_SHARE) ** 0.5 * weight + common.repeat_interleave(TILE, 0)[:vocabulary]


def _with_live_tiles(
    noise: Tensor, weight: Tensor, wanted: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Raises a few entries a row until as many tiles are live as wanted; then targets are sampled on-policy.

    The raised entries keep random distances below the likeliest: with one alone, its probability would be
    almost one, the gradient almost nothing, and an error relative to it large. The logits of
    base + height·peaks are z + height·u, so a row's height is found by bisection on two products, and fewer
    tiles are live the higher it is.
    """
    hidden, targets = torch.empty_like(noise), torch.empty_like(wanted)
    vocabulary = weight.float().T
    for rows in row_chunks(noise, weight):
        base, peaks = _candidates(noise[rows].float(), weight, wanted[rows], generator)
        z, u = base @ vocabulary, peaks @ vocabulary
        height = _heights(z, u, wanted[rows])
        hidden[rows] = torch.addcmul(base, height, peaks).to(noise.dtype)
        p = torch.addcmul(z, height, u).softmax(1)
        targets[rows] = torch.multinomial(p, 1, generator=generator).squeeze(1)
    return hidden, targets


def _candidates(
    noise: Tensor, weight: Tensor, wanted: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(n, H) rows with each candidate's distance taken off, and (n, H) the candidates' sum.

    As many candidates as tiles are wanted, at most `_CANDIDATES`; distances add up from exponential gaps.
    """
    shape = (len(noise), _CANDIDATES)
    kind = {"device": noise.device, "generator": generator}
    entries = weight[torch.randint(weight.shape[0], shape, **kind)].float()
    used = torch.arange(_CANDIDATES, device=noise.device) < wanted[:, None]
    gaps = -_MEAN_GAP * torch.rand(shape, **kind).clamp_min(1e-6).log()
    gaps[:, 0] = 0
    distances = gaps.cumsum(1) * used
    return (
        noise - (distances[:, None] @ entries).squeeze(1),
        (used.float()[:, None] @ entries).squeeze(1),
    )


def _heights(z: Tensor, u: Tensor, wanted: Tensor) -> Tensor:
    """(n, 1): the height whose row comes closest to the wanted tiles, (n,); of several the least peaked."""
    low = torch.zeros(len(z), 1, device=z.device)
    high = torch.full_like(low, _HIGHEST_PEAK)
    best, closest = low, torch.full_like(wanted, z.shape[1])[:, None]
    for _ in range(_BISECTIONS):
        height = (low + high) / 2
        excess = (count_live(torch.addcmul(z, height, u)) - wanted)[:, None]
        best = torch.where(excess.abs() <= closest, height, best)
        closest = torch.minimum(closest, excess.abs())
        low, high = torch.where(excess > 0, height, low), torch.where(excess > 0, high, height)
    return best
