"""Compiled kernels of the head against float64: edges of sizes, dtypes, layouts and options.

Collected with `EMULATE=sm_90` only: `make test-compiled` runs all of them, `make test` a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from grpo_fast.head import operator, plan, tuning
from grpo_fast.head.plan import Device
from tests.conftest import EMULATED
from tests.head.conftest import Call, exact_gradients, statistics
from tests.head.test_divergence import random_pair

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """A call. `limit` bounds the relative error of its gradients."""

    rows: int = 12
    depth: int = 64
    vocabulary: int = 300
    dtype: torch.dtype = BF16
    tolerance: float = 0.0
    masked: slice | None = None
    peak: float = 10.0
    bias: torch.dtype | None = None
    entropy: float = 0.0
    layout: str = ""
    into: torch.dtype | None = None
    frozen: bool = False
    transform: dict[str, Any] = field(default_factory=dict)
    keep: bool = False
    temperature: bool = False
    sizes: dict[str, Any] = field(default_factory=lambda: {"row_entries": 64})  # fewer instructions
    limit: float | None = None


EVERY = slice(None)
WHOLE = {"bias": BF16, "temperature": True, "transform": {"softcap": 8.0, "logit_scale": 1.3}}
NO_ROOM = {"row_entries": 64, "usual_density": 0.01, "least_pairs": 1}
CASES = {
    "shipped sizes": Case(rows=6, tolerance=2.5, sizes={}),
    "all rows masked": Case(masked=EVERY, tolerance=2.5),
    "all rows masked, exact": Case(masked=EVERY),
    **{f"N=1, tolerance {t}": Case(rows=1, tolerance=t) for t in (0.0, 2.5)},
    "V=2, N=1": Case(rows=1, vocabulary=2, tolerance=2.5),
    **{f"V={v}": Case(vocabulary=v, tolerance=2.5) for v in (1, 100, 129, 257)},
    "V=127, exact": Case(vocabulary=127),
    **{f"H={h}": Case(depth=h, tolerance=2.5) for h in (1, 8, 20, 72, 200)},
    "H=20, exact": Case(depth=20),
    **{str(dtype): Case(dtype=dtype, tolerance=2.5) for dtype in (F16, F32)},
    "float32, exact": Case(dtype=F32, limit=1e-5),
    "float32 bias": Case(bias=F32, tolerance=2.5),
    "bias, temperature, softcap": Case(**WHOLE, tolerance=2.5),
    "bias, temperature, softcap, exact": Case(**WHOLE),
    "entropy bonus": Case(entropy=0.05, tolerance=2.5),
    "large entropy bonus": Case(entropy=1.0, tolerance=2.5),
    "entropy, exact": Case(entropy=0.5),
    **{
        layout: Case(layout=layout, tolerance=2.5)
        for layout in ("weight transposed", "rows padded with NaN", "weight off by one element")
    },
    **{layout: Case(layout=layout, tolerance=2.5) for layout in ("hidden expanded", "hidden column major")},
    "into a float32 gradient": Case(into=F32, tolerance=2.5),
    "into a bf16 gradient, exact": Case(into=BF16, limit=2e-2),
    "kept exponentials": Case(keep=True),
    "kept exponentials, bias, temperature": Case(bias=BF16, temperature=True, keep=True),
    "frozen, exact": Case(frozen=True),
    "frozen": Case(frozen=True, tolerance=2.5),
    "more pairs than usual": Case(tolerance=2.5, sizes=NO_ROOM | {"most_density": 1.0}),
    "more pairs than most": Case(tolerance=2.5, sizes=NO_ROOM | {"most_density": 0.02}),
    "several blocks of rows": Case(rows=150, vocabulary=140, masked=slice(3, None, 4), tolerance=2.5),
    "flat, V=2000": Case(rows=8, vocabulary=2000, peak=0.0, tolerance=4.0, limit=1e-1),
}  # fmt: skip
RINGS = {f"{p} programs": (p, Case(*sizes, peak=0.0, masked=slice(0, None, 9))) for p, sizes in {
    3: (270, 320, 1100), 5: (130, 448, 600), 40: (130, 64, 600),
}.items()}  # fmt: skip


@pytest.fixture(autouse=True)
def shipped_plan(monkeypatch, garbage_in_new_memory):
    """Let the head plan for the emulated architecture."""
    capability = divmod(int(EMULATED[3:]), 10)
    device = Device("cuda", capability, tuning.SHARED_MEMORY[EMULATED], has_triton=True)
    monkeypatch.setattr(operator, "device_facts", lambda kind, index: device)


def arranged(case: Case, rng: torch.Generator) -> Call:
    """Make a call in the case's memory layout."""
    weight = (torch.randn(case.vocabulary, case.depth, generator=rng) / case.depth**0.5).to(case.dtype)
    targets = torch.randint(0, case.vocabulary, (case.rows,), generator=rng)
    height = case.peak * torch.rand(case.rows, 1, generator=rng)
    hidden = torch.randn(case.rows, case.depth, generator=rng) + height * weight[targets].float()
    hidden = hidden.to(case.dtype)
    if case.masked:
        targets[case.masked] = -100
    match case.layout:
        case "weight transposed":
            weight = weight.t().contiguous().t()
        case "hidden column major":
            hidden = hidden.t().contiguous().t()
        case "hidden expanded":
            hidden = hidden[:1].expand_as(hidden)
        case "weight off by one element":
            weight = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view_as(weight)
        case "rows padded with NaN":
            hidden, weight = (
                torch.nn.functional.pad(t, (0, 12), value=torch.nan)[:, : case.depth]
                for t in (hidden, weight)
            )
    bias = torch.randn(case.vocabulary, generator=rng).to(case.bias).requires_grad_() if case.bias else None
    temperature = torch.rand(case.rows, generator=rng) + 0.5 if case.temperature else 1.0
    weight.requires_grad_(not case.frozen)
    return Call(hidden.requires_grad_(), weight, targets, bias, temperature, **case.transform)


def check(case: Case, rng: torch.Generator) -> None:
    call = arranged(case, rng)
    names = ("logprob", "entropy") if case.entropy else ("logprob",)
    upstream = {name: torch.randn(case.rows, generator=rng) for name in names}
    if case.entropy:
        upstream["entropy"] *= case.entropy
    into = torch.randn(call.weight.shape, generator=rng).to(case.into) if case.into else None
    before = into.double() if case.into else None

    found = call.outputs(names, tolerance=case.tolerance, weight_grad=into, recompute=not case.keep)
    loss = sum((found[name] * gradient).sum() for name, gradient in upstream.items())
    inputs = [call.hidden, None if case.frozen or case.into else call.weight, call.bias]
    gradients = list(torch.autograd.grad(loss, [x for x in inputs if x is not None]))
    if case.into:
        gradients.insert(1, into.double() - before)

    exact = statistics(call.to(torch.float64))["logprob"]
    torch.testing.assert_close(found["logprob"].double(), exact, rtol=0, atol=2e-4)
    limit = case.limit or (2e-2 if case.tolerance else 6e-3)
    for gradient, each in zip(gradients, exact_gradients(call, upstream), strict=False):
        assert (gradient.double() - each).norm() <= limit * each.norm().clamp(min=1e-30)


@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_give_the_logprobs_and_gradients_of_float64(monkeypatch, rng, name):
    case, sizes_for = CASES[name], tuning.sizes_for

    def sizes(*given: Any) -> tuning.Sizes:
        found = sizes_for(*given)
        return replace(found, sparse=replace(found.sparse, **case.sizes))

    monkeypatch.setattr(plan, "sizes_for", sizes)

    check(case, rng)


@pytest.mark.parametrize("name", RINGS)
def test_persistent_programs_reuse_their_ring_of_stages(monkeypatch, rng, name):
    programs, case = RINGS[name]
    for module in ("forward", "dense"):
        monkeypatch.setattr(f"grpo_fast.kernels.{module}.program_count", lambda *_: programs)

    check(case, rng)


@pytest.mark.parametrize("tolerance", [0.0, 2.5])
@pytest.mark.parametrize(
    ("direction", "one_weight", "dtype"),
    [("reverse", False, BF16), ("reverse", True, F32), ("forward", True, BF16), ("jsd", False, BF16)],
)
def test_compiled_kernels_give_the_divergence_and_gradients_of_float64(
    rng, direction, one_weight, dtype, tolerance
):
    pair = random_pair(rng, 6, near=1.0 if one_weight else None).to(dtype)
    pair = pair.of_one_weight() if one_weight else pair

    found = pair.divergence(direction=direction, tolerance=tolerance)
    gradients = torch.autograd.grad(found.sum(), pair.leaves)

    exact = pair.to(torch.float64).with_clean_rows()
    expected = exact.expected(direction)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-6)
    for got, each in zip(gradients, torch.autograd.grad(expected.sum(), exact.leaves), strict=True):
        limit = 2e-2 if tolerance else 5e-3 if dtype == BF16 else 1e-5
        assert (got.double() - each).norm() <= limit * each.norm()
