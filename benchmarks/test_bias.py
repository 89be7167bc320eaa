"""Errors of a sampled and of a dropped gradient, relative to the exact one, against the number of tokens.

They are of dX, dW, and a weight behind the head, which sums over tokens, so that equal errors add up. `ours`
samples the pairs of a token and a tile below a threshold; `dropped` leaves all of them out. The `bias` of
`ours` is n·|mean error|² / mean |error|² of dX over n draws: 1 if unbiased, at most n.
"""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_fast import linear_logprob
from grpo_fast.head.plan import DEFAULT_TOLERANCE

from .rows import LENGTH, MODEL, PROMPTS, TILE, resample, rows_of

OURS, ROUNDED, DROPPED = "ours", "rounded to bfloat16", "dropped"
AXES = {
    "model": [MODEL],  # whose rows
    "dataset": [PROMPTS],  # of prompts
    "tokens": ["256", "1024", "4096"],
    "peer": (OURS, ROUNDED, DROPPED),
}
SIZES = {"draws": (100, 100)}  # of the batch of fewest tokens
GROUP = 8  # completions, one of which is right
PARTS = ("hidden_gradient", "weight_gradient", "behind")
Gradients = tuple[Tensor, Tensor]  # (N, H), (V, H)
Batch = namedtuple("Batch", "hidden weight targets upstream")
"""(N, H), (V, H), (N,), and (N,) the gradient of the log-probabilities in GRPO."""


def draw(hidden: Tensor, weight: Tensor, tokens: int, seed: int) -> Batch:
    """Sample rows with replacement, and their targets from the model."""
    hidden, targets = resample(hidden, weight, tokens, torch.Generator(hidden.device).manual_seed(seed))
    right = torch.arange(tokens, device=hidden.device) // LENGTH % GROUP == 0
    return Batch(hidden, weight, targets, (1 / GROUP - right.float()) / tokens)


def by_head(batch: Batch, tolerance: float, order: Tensor) -> tuple[Gradients, float]:
    """Return the head's gradients of reordered rows, and its density; each order samples other pairs."""
    hidden, weight = batch.hidden[order].requires_grad_(), batch.weight.clone().requires_grad_()
    out = linear_logprob(hidden, weight, batch.targets[order], tolerance=tolerance)
    dx, dw = torch.autograd.grad(out.logprob, (hidden, weight), batch.upstream[order])
    return (torch.empty_like(dx).index_copy_(0, order, dx), dw), float(out.certificate.density)


def by_logits(batch: Batch, density: float) -> dict[str, Gradients]:
    """Compute the gradients from the rounded logit gradient, and from its pairs above the threshold."""
    logits = (batch.hidden @ batch.weight.T).softmax(1).neg_()
    logits[torch.arange(len(logits)), batch.targets] += 1
    logits *= batch.upstream[:, None]
    tiles = pad(logits.abs(), (0, -len(batch.weight) % TILE)).unflatten(1, (-1, TILE)).sum(2)
    low, high = 0.0, float(tiles.max())
    for _ in range(50):  # to the threshold τ at which a pair kept with probability mass / τ has this density
        middle = (low + high) / 2
        low, high = (middle, high) if (tiles / middle).clamp(max=1).mean() > density else (low, middle)
    kept = (tiles >= high).repeat_interleave(TILE, 1)[:, : len(batch.weight)]
    edited = {ROUNDED: logits.bfloat16().float(), DROPPED: logits * kept}
    return {name: (of @ batch.weight, of.T @ batch.hidden) for name, of in edited.items()}


class Study:
    """One batch, its exact gradient, and one draw."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.order = batch, torch.randperm(len(batch.hidden), device=batch.hidden.device)
        self.exact, _ = by_head(batch, 0.0, self.order)
        self.sampled, self.density = by_head(batch, DEFAULT_TOLERANCE, self.order)

    def errors(self, name: str) -> dict[str, float]:
        """Return the errors of dX, dW and the weight behind, relative to the exact gradient."""
        dx, dw = self.sampled if name == OURS else by_logits(self.batch, self.density)[name]
        features = pad(self.batch.hidden, (0, 1), value=1.0)
        pairs = zip((dx, dw, features.T @ dx), (*self.exact, features.T @ self.exact[0]), strict=True)
        return dict(zip(PARTS, (float((a - b).norm() / b.norm()) for a, b in pairs), strict=True))

    def bias(self, draws: int) -> float:
        """Return n·|mean error|² / mean |error|² of dX."""
        orders = (torch.randperm(len(self.order), device=self.order.device) for _ in range(draws))
        errors = [by_head(self.batch, DEFAULT_TOLERANCE, order)[0][0] - self.exact[0] for order in orders]
        return float(sum(errors).square().sum() / sum(error.square().sum() for error in errors))


@pytest.fixture(scope="module")
def rows(model, dataset, device, seed):
    if device.type == "cpu":
        pytest.skip("the head's gradient is exact on a CPU: this needs a GPU")
    return rows_of(model, dataset, device, seed)


@pytest.fixture(scope="module")
def study(rows, tokens, seed):
    return Study(draw(*rows, int(tokens), seed))


def test_bias(peer, tokens, study, sizes, benchmark):
    benchmark.extra_info["accuracy"] = benchmark.pedantic(study.errors, args=(peer,))
    if peer == OURS:
        benchmark.extra_info["metrics"] = {"density": study.density}
        if tokens == AXES["tokens"][0]:
            benchmark.extra_info["metrics"] |= {"bias": study.bias(sizes["draws"])}
