"""A float64 dense oracle of the head, on rows from peaked to flat."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from grpo_fast.kernels import TILE
from torch import Tensor

from grpo_fast.head.call import HeadCall, LogitGradient, RowGradients, RowStatistics
from tests.conftest import EMULATED

collect_ignore_glob = ["test_*.py"] if find_spec("triton") is None else []
NOT_EMULATED = ["test_aot.py", "test_interpreter.py", "test_sample.py"]
collect_ignore = NOT_EMULATED if EMULATED else ["test_compiled.py"]


@dataclass(frozen=True)
class Head:
    """A batch, its forward statistics and its exact gradients, all computed densely in float64."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None
    targets: Tensor  # (N,)
    g: Tensor  # (N,) float32
    g_logsumexp: Tensor | None
    g_entropy: Tensor | None
    inv_temperature: Tensor | None
    logit_scale: float
    softcap: float | None
    probability: Tensor  # (N, V) float64
    tile_lse: Tensor  # (N, T) float32
    logsumexp: Tensor  # (N,) float32
    logprob: Tensor  # (N,) float32
    entropy: Tensor  # (N,) float32
    logit_gradient: Tensor  # (N, V) float64: dL/d(x·w + bias)
    d_hidden: Tensor  # float64
    d_weight: Tensor
    d_bias: Tensor

    @property
    def call(self) -> HeadCall:
        transform = self.bias, self.inv_temperature, self.logit_scale, self.softcap
        return HeadCall(self.hidden, self.weight, self.targets, *transform, seed=11)

    @property
    def upstream(self) -> tuple[RowStatistics, RowGradients]:
        nothing = self.logprob.new_empty(0)
        statistics = RowStatistics(self.logprob, self.logsumexp, self.entropy, *4 * (nothing,))
        return statistics, RowGradients(self.g, self.g_logsumexp, self.g_entropy)

    @property
    def gradient(self) -> LogitGradient:
        return LogitGradient.of(self.call, *self.upstream)


@pytest.fixture(autouse=True)
def kernels_meet_garbage(garbage_in_new_memory):
    """Fill new memory with garbage: no kernel may read unwritten memory."""


@pytest.fixture
def make_head(rng: torch.Generator, device: torch.device):
    """Make heads with some rows ignored or without gradient; `peak` scales the target's logit."""

    def make(
        rows: int = 70,
        vocabulary: int = 700,
        depth: int = 48,
        *,
        dtype: torch.dtype = torch.float32,
        peak: float = 8.0,
        spread: float = 2.0,
        transformed: bool = False,
        g_logsumexp: bool = False,
        g_entropy: float = 0.0,
    ) -> Head:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        weight = (normal(vocabulary, depth) / depth**0.5).to(dtype)
        targets = torch.randint(0, vocabulary, (rows,), generator=rng)
        height = peak * torch.rand(rows, 1, generator=rng, dtype=torch.float64)
        hidden = (spread * normal(rows, depth) + height * weight[targets].double()).to(dtype)
        targets[3::7] = -1
        g = normal(rows).float()
        g[5::6] = 0
        bias = normal(vocabulary).to(dtype) if transformed else None
        inv_temperature = torch.rand(rows, generator=rng) + 0.5 if transformed else None
        scale, softcap = (1.25, 6.0) if transformed else (1.0, None)
        g_lse = normal(rows).float() * 0.1 if g_logsumexp else None
        of_entropy = normal(rows).float() * g_entropy if g_entropy else None
        operands = [
            t if t is None else t.to(device)
            for t in (hidden, weight, bias, targets, g, g_lse, of_entropy, inv_temperature)
        ]
        return solve(*operands, logit_scale=scale, softcap=softcap)

    return make


def solve(
    hidden, weight, bias, targets, g, g_logsumexp, g_entropy, inv_temperature, *, logit_scale, softcap
) -> Head:
    """Compute the dense head in float64."""
    working = targets >= 0
    products = hidden.double() @ weight.double().T
    if bias is not None:
        products = products + bias.double()
    products.requires_grad_()
    logits = products * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if inv_temperature is not None:
        logits = logits * inv_temperature.double()[:, None]
    logsumexp = logits.logsumexp(1)
    logprob = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0] - logsumexp
    loss = (torch.where(working, g, 0.0).double() * logprob).sum()
    if g_logsumexp is not None:
        loss = loss + (torch.where(working, g_logsumexp, 0.0).double() * logsumexp).sum()
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
    if g_entropy is not None:
        loss = loss + (torch.where(working, g_entropy, 0.0).double() * entropy).sum()
    (gradient,) = torch.autograd.grad(loss, products)
    tiles = logits.detach().split(TILE, 1)
    return Head(
        hidden=hidden, weight=weight, bias=bias, targets=targets,
        g=g, g_logsumexp=g_logsumexp, g_entropy=g_entropy,
        inv_temperature=inv_temperature, logit_scale=logit_scale, softcap=softcap,
        probability=logits.detach().softmax(1),
        tile_lse=torch.stack([tile.logsumexp(1) for tile in tiles], 1).float(),
        logsumexp=logsumexp.detach().float(), logprob=logprob.detach().float(),
        entropy=entropy.detach().float(), logit_gradient=gradient,
        d_hidden=gradient @ weight.double(), d_weight=gradient.T @ hidden.double(), d_bias=gradient.sum(0),
    )  # fmt: skip
