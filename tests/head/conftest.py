"""Random calls of the head, and the dense head as their oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from grpo_fast import linear_logprob
from grpo_fast.head import operator, plan, tuning
from grpo_fast.head.plan import Device

KERNELS = {
    "descriptors": Device("cuda", (9, 0), shared_memory=232_448, has_triton=True),
    "pointers": Device("cuda", (8, 0), shared_memory=166_912, has_triton=True),
}
# The interpreter pays per program and per step.
QUICK = {"pair_rows": 32, "pair_depth": 32, "row_entries": 64, "weight_depth": 32, "weight_columns": 64}


@dataclass(frozen=True)
class Call:
    """Arguments of `linear_logprob`."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor | None = None
    bias: Tensor | None = None
    temperature: float | Tensor = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def options(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("bias", "temperature", "logit_scale", "softcap")}

    def outputs(self, names: Sequence[str] = ("logprob",), **options: object) -> dict[str, Tensor]:
        options = self.options | options
        out = linear_logprob(self.hidden, self.weight, self.targets, outputs=names, **options)
        return {name: getattr(out, name) for name in names}

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.hidden, self.weight, self.bias) if t is not None)

    def to(self, dtype: torch.dtype) -> Call:
        """Cast the parameters to new leaves."""

        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

        return replace(self, hidden=cast(self.hidden), weight=cast(self.weight), bias=cast(self.bias))


def full_logits(call: Call) -> Tensor:
    """(..., V) logits, float32 or float64."""
    logits = call.hidden @ call.weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if call.bias is not None:
        logits = logits + call.bias.to(logits.dtype)
    logits = logits * call.logit_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    temperature = call.temperature
    per_token = isinstance(temperature, Tensor) and temperature.dim()
    return logits / (temperature[..., None] if per_token else temperature)


def statistics(call: Call) -> dict[str, Tensor]:
    """Compute every statistic from full logits."""
    logits = full_logits(call)
    worked = call.targets != -100
    logprobs = logits.log_softmax(-1)
    p = logprobs.exp()
    at_target = logprobs.gather(-1, call.targets.clamp(min=0)[..., None])[..., 0]
    terms = p * torch.where(p > 0, logprobs, torch.zeros_like(p))
    every = {
        "logprob": at_target,
        "entropy": -terms.sum(-1),
        "logsumexp": logits.logsumexp(-1),
        "mean_logit": logits.mean(-1),
        "log_sum_sq_probs": (2 * logprobs).logsumexp(-1),
    }
    found = {name: torch.where(worked, value, 0) for name, value in every.items()}
    return found | {"argmax_is_target": (at_target >= logprobs.amax(-1)) & worked}


def gradients(call: Call, found: dict[str, Tensor], upstream: dict[str, Tensor]) -> list[Tensor]:
    """Differentiate Σ upstream·statistic in hidden, weight and bias."""
    loss = sum((found[name] * gradient.to(found[name].dtype)).sum() for name, gradient in upstream.items())
    return list(torch.autograd.grad(loss, call.parameters))


def exact_gradients(call: Call, upstream: dict[str, Tensor]) -> list[Tensor]:
    """Differentiate full logits in float64."""
    wide = call.to(torch.float64)
    for parameter in wide.parameters:
        parameter.requires_grad_()
    return gradients(wide, statistics(wide), upstream)


def relative(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)).item()


def sure_rows(rng: torch.Generator, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """Make rows whose likeliest entry leads by 1 to 80 nats, with products that float32 holds exactly.

    Returns:
        (80, 88) hidden states, (300, 88) weight and (80,) likeliest entries.
    """
    rows, words = 80, 300
    small = [torch.randint(-8, 9, (count, 7), generator=rng) / 8.0 for count in (words, rows)]
    best = torch.randperm(words, generator=rng)[:rows]
    own = torch.zeros(words, rows).index_put_((best, torch.arange(rows)), torch.tensor(1.0))
    weight = torch.cat([small[0], torch.ones(words, 1), own], 1)
    hidden = torch.cat([small[1], torch.full((rows, 1), level), torch.zeros(rows, rows)], 1)
    logits = (hidden @ weight.T).double()
    others = logits.scatter(1, best[:, None], -torch.inf).logsumexp(1)
    height = torch.arange(1, 81) + others - logits.gather(1, best[:, None])[:, 0]
    hidden[:, 8:] = torch.diag((height * 2).round().float() / 2)
    return hidden, weight, best


@pytest.fixture(autouse=True)
def the_head_meets_garbage(garbage_in_new_memory):
    """Fill new memory with garbage: unwritten memory must not be read."""


@pytest.fixture(scope="session")
def oracle() -> SimpleNamespace:
    """Return the dense head, and a relative error."""
    parts = (Call, full_logits, statistics, gradients, exact_gradients, relative)
    return SimpleNamespace(**{part.__name__: part for part in parts})


@pytest.fixture
def sparse_sizes(monkeypatch):
    """Change sizes of the sparse backward."""

    def change(**changes: object) -> None:
        def sizes_for(*shape):
            sizes = tuning.sizes_for(*shape)
            return replace(sizes, sparse=replace(sizes.sparse, **changes))

        monkeypatch.setattr(plan, "sizes_for", sizes_for)

    return change


def take_path(name: str, request: pytest.FixtureRequest):
    """Let the head take a path; return a function that moves calls and tensors to its device."""
    device, patch = torch.device("cpu"), request.getfixturevalue("monkeypatch")
    if name == "reference":  # several chunks of rows and of the vocabulary
        patch.setattr(plan, "_CPU_CHUNK_BYTES", 1)
        patch.setattr(plan, "_CHUNK_ROWS", 8)
    else:
        pytest.importorskip("triton")
        device = request.getfixturevalue("device")
        if device.type == "cpu":
            patch.setattr(operator, "device_facts", lambda kind, index: KERNELS[name])
            request.getfixturevalue("sparse_sizes")(**QUICK)

    def move(value):
        if isinstance(value, Tensor):
            return value.detach().to(device).requires_grad_(value.requires_grad)
        if isinstance(value, tuple):
            return type(value)(*map(move, value))
        return replace(value, **{k: move(v) for k, v in vars(value).items() if isinstance(v, Tensor)})

    return move


@pytest.fixture
def hopper(request):
    """Move calls to a GPU with descriptors, which is interpreted without one."""
    return take_path("descriptors", request)


@pytest.fixture(params=["reference", *KERNELS])
def on_path(request):
    """Move calls to each of the head's paths."""
    return take_path(request.param, request)


@pytest.fixture
def make_call(rng: torch.Generator):
    """Make calls with leaf parameters, in which every fourth row is ignored."""

    def make(
        shape: Sequence[int] = (13,),
        vocabulary: int = 300,
        depth: int = 24,
        *,
        dtype: torch.dtype = torch.float32,
        spread: float = 3.0,
        transformed: bool = False,
        bias: bool = False,
    ) -> Call:
        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=rng)

        targets = torch.randint(0, vocabulary, tuple(shape), generator=rng)
        targets.view(-1)[2::4] = -100
        return Call(
            hidden=(spread * normal(*shape, depth)).to(dtype).requires_grad_(),
            weight=(normal(vocabulary, depth) / depth**0.5).to(dtype).requires_grad_(),
            targets=targets,
            bias=normal(vocabulary).to(dtype).requires_grad_() if bias or transformed else None,
            temperature=torch.rand(tuple(shape), generator=rng) + 0.5 if transformed else 1.0,
            logit_scale=0.75 if transformed else 1.0,
            softcap=4.0 if transformed else None,
        )

    return make


@pytest.fixture
def make_upstream(rng: torch.Generator):
    def make(shape: Sequence[int], names: Sequence[str] = ("logprob",)) -> dict[str, Tensor]:
        return {name: torch.randn(*shape, generator=rng) for name in names}

    return make
