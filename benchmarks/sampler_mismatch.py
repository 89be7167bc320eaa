"""`python -m benchmarks mismatch`: training on completions that rounded weights have drawn.

The toy of `tolerance_training` learns to sort from one warm start, while the sampler has the policy's
weights rounded to a few bits. It reports its own log-probabilities, as vLLM does, and each correction makes
of them what it can. The score is the trained policy's own, on questions that are the same for all.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from grpo_fast.objective import GRPOLossConfig
from grpo_fast.policy import Policy, pack
from grpo_fast.table import Completions
from grpo_fast.update import packed_loss

from .machine import environment
from .record import write_json
from .step import LOSS
from .tolerance_training import learn, make_toy, score, warm_start

ICEPOP = {"sampler_correction": "token_mask", "sampler_clip_min": 0.5, "sampler_clip_max": 5.0}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "sequence_mask": {"sampler_correction": "sequence_mask"},
    "sequence_truncate": {"sampler_correction": "sequence_truncate"},
    "token_truncate": {"sampler_correction": "token_truncate"},
    "token_mask, 0.5 to 5": ICEPOP,
}
METRICS = ("logp_difference_mean", "kl", "importance_ratio_mean", "rejected_mean")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3], help="of the sampler's weights (4 3)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="(0 to 4)")
    parser.add_argument("--steps", type=int, default=80, help="of a run (80)")
    parser.add_argument("--questions", type=int, default=256, help="held out, four answers each (256)")
    parser.add_argument("--json", type=Path, help="write everything here")


def main(options: argparse.Namespace) -> int:
    runs: list[dict[str, Any]] = []
    document = {"environment": environment(torch.device("cpu")), "steps": options.steps, "runs": runs}
    for seed in options.seeds:
        start = make_toy(seed)
        warm_start(start, random.Random(seed))
        for bits, correction in [(None, "none"), *((b, name) for b in options.bits for name in CORRECTIONS)]:
            policy, config = copy.deepcopy(start), replace(LOSS, **CORRECTIONS[correction])
            run = {"bits": bits, "correction": correction, "seed": seed}
            run |= train(policy, config, bits, options.steps, seed)
            runs.append(run | {"score": score(policy, options.questions)})
            print(" ".join(f"{key}={value}" for key, value in runs[-1].items()), flush=True)
        if options.json is not None:
            write_json(options.json, document | {"samplers": list(summary(runs))})
    return 0


def train(
    policy: Policy, config: GRPOLossConfig, bits: int | None, steps: int, seed: int
) -> dict[str, float]:
    """Train on what the rounded weights draw; how far they were from the policy, the mean over the steps."""
    found = dict.fromkeys(METRICS, 0.0)

    def loss(samples: Completions) -> Tensor:
        (batch,) = pack(samples, max_tokens=1 << 20, device=policy.device)
        out = packed_loss(policy, batch, config)
        for name in METRICS:
            found[name] += out.metrics[f"sampling/{name}"].item() / steps
        return out.loss

    learn(policy, partial(rounded, copy.deepcopy(policy), policy, bits), loss, steps, seed)
    return found


@torch.no_grad()
def rounded(sampler: Policy, policy: Policy, bits: int | None) -> Policy:
    """The sampler with the policy's weights; matrices in `bits` signed bits, a scale for each row."""
    for there, weight in zip(sampler.model.parameters(), policy.model.parameters(), strict=True):
        there.copy_(weight)
        if bits is not None and weight.dim() == 2:
            largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)  # padding's row is zero
            scale = largest / (2 ** (bits - 1) - 1)
            there.copy_((weight / scale).round() * scale)
    return sampler


def summary(runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each sampler and correction the means over the seeds, and the standard error of the score."""
    for arm in dict.fromkeys((run["bits"], run["correction"]) for run in runs):
        seeds = [run for run in runs if (run["bits"], run["correction"]) == arm]
        means = {name: fmean(run[name] for run in seeds) for name in ("score", *METRICS)}
        scores = [run["score"] for run in seeds]
        error = stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan
        yield {"bits": arm[0], "correction": arm[1], "error": error, **means}
