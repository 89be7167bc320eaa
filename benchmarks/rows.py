"""Where a batch's rows come from: made, taken from a model, or made to match a model's live tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .accuracy import exact_logprobs
from .live_tiles import TILE, Histogram, count_live
from .problem import DPO, DTYPES, FORWARD_BACKWARD, GRPO, Problem, Setting

KINDS = ("flat", "peaked", "real", "histogram")
_FLAT_SPREAD, _PEAKED_SPREAD = 1.0, 2.5  # standard deviation of the logits
_PEAKS = (10.0, 25.0)  # range of what a peaked row's target stands out by
_MOST_PROBLEMS, _CPU_CACHE_BYTES, _CHUNK_BYTES = 8, 32 << 20, 256 << 20
_HIGHEST_PEAK, _BISECTIONS = 80.0, 16
_CANDIDATES, _MEAN_GAP = 5, 3.0  # raised entries of a row, and nats from one to the next on average
_MODEL_SPREAD, _TILE_SHARE = 4.0, 0.25
"""Of the other logits of a row made to match a model: standard deviation, and the part of their variance that
the entries of a tile have in common. Chosen on 320 rows of Qwen2.5-Coder-1.5B: with 2.5 and none, as many
tiles hold a probability above 1e-5, but 28-32 % instead of 11 % one above 1e-6, and the certified backward
visits 8-15 % instead of 2 %."""
_NEAR, _FAR, _FAR_SHARE = 0.1, 0.4, 0.1
"""Log-ratios of the policy to the old one: at most `_NEAR`, or `_FAR` either way for a share of the tokens.
In between lies the clip; rounding must not decide on which side of it a token is."""
_REFERENCE_SPREAD = 0.1  # standard deviation of the log-ratio to the reference


@dataclass(frozen=True)
class RealRows:
    """A model's own rows, on the CPU."""

    name: str
    hidden: Tensor  # (M, H) after the last norm
    targets: Tensor  # (M,) int64, the tokens that were sampled there
    weight: Tensor  # (V, H) the model's head


Source = RealRows | Histogram | None
"""What "real" rows and those of a "histogram" are made from; the others need none."""


def describe(setting: Setting, source: Source = None) -> str:
    """Where the rows come from: one line to print beside the numbers."""
    if isinstance(source, RealRows):
        return f"{len(source.hidden):,} rows of {source.name}, drawn with replacement"
    if isinstance(source, Histogram):
        scaled = "" if source.vocabulary == setting.vocabulary else f", scaled from V {source.vocabulary:,}"
        return (
            f"random rows made to have the live tiles of {source.source} (tiles with a probability above "
            f"{source.threshold:g}: {source.density:.2%}{scaled})"
        )
    if setting.rows == "flat":
        return f"random rows, logits of standard deviation {_FLAT_SPREAD:g}"
    raised = "targets raised by {:g} to {:g}".format(*_PEAKS)
    return f"random rows, logits of standard deviation {_PEAKED_SPREAD:g}, {raised}"


def load_real_rows(path: Path) -> RealRows:
    """Reads a safetensors file with `hidden` (M, H), `target` (M,) int64 and `weight` (V, H), the head.

    Raises:
        ValueError: a tensor is missing or does not fit the others.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--real-rows {path} cannot be read as safetensors: {error}") from error
    missing = [name for name in ("hidden", "target", "weight") if name not in tensors]
    if missing:
        raise ValueError(
            f"--real-rows {path} holds {sorted(tensors)} but no {', '.join(missing)}; "
            "`python -m benchmarks rows` writes such files"
        )
    hidden, targets, weight = tensors["hidden"], tensors["target"].long(), tensors["weight"]
    if hidden.shape[0] != targets.shape[0] or hidden.shape[1] != weight.shape[1] or not len(hidden):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise ValueError(f"--real-rows {path}: shapes {shapes} are not (M, H), (M,) and (V, H)")
    if int(targets.min()) < 0 or int(targets.max()) >= weight.shape[0]:
        raise ValueError(f"--real-rows {path}: targets must lie in [0, {weight.shape[0]})")
    return RealRows(about.get("source", path.stem), hidden, targets, weight)


def make_problems(setting: Setting, device: torch.device, seed: int, source: Source = None) -> list[Problem]:
    """Batches that differ, so many that who takes them in turn finds none of its inputs in the cache."""
    first = make_problem(setting, device, seed, source)
    cache = _CPU_CACHE_BYTES
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    size = sum(t.nbytes for t in (first.hidden, first.weight, first.targets))
    count = min(_MOST_PROBLEMS, 1 + 2 * cache // size)
    return [first, *(make_problem(setting, device, seed + n, source) for n in range(1, count))]


def make_problem(setting: Setting, device: torch.device, seed: int, source: Source = None) -> Problem:
    """A batch of the setting; another seed gives other rows and another place in memory.

    Raises:
        ValueError: a batch for DPO that cannot be halved.
    """
    if setting.loss == DPO and setting.tokens % 2:
        raise ValueError(
            f"DPO compares one half of the batch with the other: {setting.tokens} tokens are odd"
        )
    generator = torch.Generator(device).manual_seed(seed)
    hidden, weight, targets = _rows(setting, source, device, generator)
    sequences = math.gcd(setting.tokens, 16)
    advantages = torch.randn(sequences, device=device, generator=generator)
    advantages = torch.where(advantages < 0, advantages - 0.1, advantages + 0.1)
    old = reference = None
    if setting.loss == GRPO:
        logprobs, _ = exact_logprobs(hidden, weight, targets, torch.float32)
        kind = {"device": device, "generator": generator}
        steps = 2 * torch.rand(setting.tokens, **kind) - 1
        far = torch.rand(setting.tokens, **kind) < _FAR_SHARE
        old = logprobs - torch.where(far, _FAR * steps.sign(), _NEAR * steps)
        reference = logprobs - _REFERENCE_SPREAD * torch.randn(setting.tokens, **kind)
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
    setting: Setting, source: Source, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = DTYPES[setting.dtype]
    if isinstance(source, RealRows):
        index = torch.randint(len(source.hidden), (setting.tokens,), device=device, generator=generator).cpu()
        hidden, weight = source.hidden[index].to(device, dtype), source.weight.to(device, dtype, copy=True)
        return hidden, weight, source.targets[index].to(device)
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
    wanted = source.draw(setting.tokens, setting.vocabulary, on_cpu).to(device)
    # Rows of a tile share a part: likely words come in clusters.
    common = torch.randn(-(-setting.vocabulary // TILE), setting.hidden, dtype=dtype, **kind)
    common *= (_TILE_SHARE / setting.hidden) ** 0.5
    weight = (1 - _TILE_SHARE) ** 0.5 * weight + common.repeat_interleave(TILE, 0)[: setting.vocabulary]
    hidden, targets = _with_live_tiles(noise.mul_(_MODEL_SPREAD), weight, wanted, generator)
    return hidden, weight, targets


def _with_live_tiles(
    noise: Tensor, weight: Tensor, wanted: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Raises a few entries a row until as many tiles are live as wanted; then targets are sampled on-policy.

    As many entries are raised as tiles are wanted, at most `_CANDIDATES`; they keep random distances below
    the likeliest, sums of exponential gaps: with one alone, its probability would be almost one, the gradient
    almost nothing, and an error relative to it large. The logits of base + height·peaks are z + height·u, so
    a row's height is found by bisection on two products, and fewer tiles are live the higher it is.
    """
    hidden, targets = torch.empty_like(noise), torch.empty_like(wanted)
    vocabulary = weight.float().T
    kind = {"device": noise.device, "generator": generator}
    size = max(1, _CHUNK_BYTES // (4 * weight.shape[0]))  # rows whose logits fit
    for rows in (slice(start, start + size) for start in range(0, len(noise), size)):
        shape = (len(noise[rows]), _CANDIDATES)
        entries = weight[torch.randint(weight.shape[0], shape, **kind)].float()  # (n, candidates, H)
        used = torch.arange(_CANDIDATES, device=noise.device) < wanted[rows, None]
        gaps = -_MEAN_GAP * torch.rand(shape, **kind).clamp_min(1e-6).log()
        gaps[:, 0] = 0
        distances = gaps.cumsum(1) * used
        base = noise[rows].float() - (distances[:, None] @ entries).squeeze(1)
        peaks = (used.float()[:, None] @ entries).squeeze(1)
        z, u = base @ vocabulary, peaks @ vocabulary
        height = _heights(z, u, wanted[rows])
        hidden[rows] = torch.addcmul(base, height, peaks).to(noise.dtype)
        p = torch.addcmul(z, height, u).softmax(1)
        targets[rows] = torch.multinomial(p, 1, generator=generator).squeeze(1)
    return hidden, targets


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
