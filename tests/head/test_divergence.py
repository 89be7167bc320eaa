"""The divergence of two heads against float64 logits, on each path."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from grpo_fast.kernels import BF16_ROUNDING, TILE
from torch import Tensor

from grpo_fast import GRPOLossConfig, linear_grpo_loss, linear_kl
from grpo_fast.head import plan
from grpo_fast.head.checks import kl_call
from grpo_fast.head.operator import plan_of
from tests.head.conftest import QUICK, Call, full_logits, sure_rows

DIRECTIONS = ("reverse", "forward", "jsd")


class Pair(NamedTuple):
    """Arguments of `linear_kl`."""

    student: Call
    reference: Call
    mask: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in self.student.parameters if leaf.requires_grad]

    @property
    def arguments(self) -> dict[str, Any]:
        ours, theirs = ({"hidden": c.hidden, "weight": c.weight, **c.options} for c in self[:2])
        return {"mask": self.mask} | ours | {f"ref_{name}": each for name, each in theirs.items()}

    def divergence(self, **options: Any) -> Tensor:
        return linear_kl(**self.arguments, **options).divergence

    def to(self, dtype: torch.dtype) -> Pair:
        return Pair(self.student.to(dtype), self.reference.to(dtype), self.mask)

    def of_one_weight(self) -> Pair:
        return self._replace(reference=replace(self.reference, weight=self.student.weight))

    def with_clean_rows(self) -> Pair:
        """Replace NaN in masked rows by zero."""
        hidden = torch.where(self.mask[:, None], self.student.hidden.detach(), 0).requires_grad_()
        return self._replace(student=replace(self.student, hidden=hidden))

    def tile_sizes(self, direction: str, beta: float, upstream: Tensor) -> Tensor:
        """(N, T) float64 Σ|dL/d(x·w)| over each tile."""
        wide = self.to(torch.float64).with_clean_rows()
        products = (wide.student.hidden @ wide.student.weight.T).detach().requires_grad_()
        whole = replace(wide.student, hidden=products, weight=torch.eye(products.shape[1]).to(products))
        loss = (wide._replace(student=whole).expected(direction, beta) * upstream).sum()
        (gradient,) = torch.autograd.grad(loss, products)
        return torch.stack([tile.abs().sum(1) for tile in gradient.split(TILE, 1)], 1)

    def expected(
        self, direction: str, beta: float = 0.5, topk: int | None = None, tolerance: float | None = None
    ) -> Tensor:
        """Compute divergences from full logits."""
        entries = min(self.student.weight.shape[0], self.reference.weight.shape[0])
        log_p, log_q = (full_logits(call)[:, :entries].log_softmax(1) for call in self[:2])
        if topk is not None:
            best = log_q.topk(topk).indices

            def coarse(logprobs: Tensor) -> Tensor:
                rest = logprobs.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)
                return torch.cat([logprobs.gather(-1, best), rest], -1)

            log_p, log_q = coarse(log_p), coarse(log_q)
        p, q = log_p.exp(), log_q.exp()
        if direction == "jsd":
            log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
            terms = (1 - beta) * p * (log_p - log_m) + beta * q * (log_q - log_m)
        else:
            terms = p * (log_p - log_q) if direction == "reverse" else q * (log_q - log_p)
        return torch.where(self.mask, terms.sum(-1), 0)


def random_pair(
    rng: torch.Generator,
    rows: int = 13,
    vocabulary: int = 300,
    *,
    padding: int = 0,
    transformed: bool = False,
    frozen: bool = False,
    near: float | None = None,
) -> Pair:
    """Make heads of different hidden sizes; every fourth row is masked, with NaN in the student's."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng)

    mask = torch.arange(rows) % 4 != 2
    hidden, weight = 3 * normal(rows, 24), normal(vocabulary, 24) / 24**0.5
    ref_hidden, ref_weight = 3 * normal(rows, 16), normal(vocabulary + padding, 16) / 4
    if near is not None:
        ref_hidden, ref_weight = hidden + near * normal(rows, 24), weight
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if transformed:
        ours = {"temperature": torch.rand(rows, generator=rng) + 0.5, "logit_scale": 0.75, "softcap": 4.0}
        ours["bias"] = normal(vocabulary).requires_grad_(not frozen)
        theirs = {"temperature": 1.3, "logit_scale": 1.1, "softcap": 5.0}
        theirs["bias"] = normal(vocabulary + padding)
    hidden[~mask] = torch.nan
    student = Call(hidden.requires_grad_(), weight.requires_grad_(not frozen), **ours)
    return Pair(student, Call(ref_hidden, ref_weight.detach(), **theirs), mask)


@pytest.fixture
def make_pair(rng: torch.Generator):
    return partial(random_pair, rng)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("shape", ["plain", "transformed", "padded", "topk", "one weight"])
@pytest.mark.parametrize(
    ("path", "dtype", "limit", "of_gradient"),
    [
        ("reference", torch.float64, 1e-11, 1e-11),
        ("reference", torch.float32, 1e-5, 1e-5),
        ("reference", torch.bfloat16, 1e-5, 2.5e-3),
        ("hopper", torch.float32, 1e-5, 2e-5),
        # The logit gradient is rounded, too.
        ("hopper", torch.bfloat16, 1e-5, 4e-3),
        ("hopper", torch.float16, 1e-5, 2.5e-3),
    ],
)
def test_divergence_and_gradients_are_those_of_float64_logits(
    make_pair, rng, oracle, request, monkeypatch, direction, frozen, shape, path, dtype, limit, of_gradient
):
    monkeypatch.setattr(plan, "_DIVERGENCE_CHUNKS", 0)  # a row at a time
    monkeypatch.setattr(plan, "_CPU_CHUNK_BYTES", 1)
    pair = make_pair(
        padding=10 if shape == "padded" else 0,
        transformed=shape == "transformed",
        frozen=frozen,
        near=1.0 if shape == "one weight" else None,
    )
    pair = pair.to(dtype)
    move = (lambda value: value) if path == "reference" else request.getfixturevalue(path)
    pair = move(pair)
    if shape == "one weight":
        pair = pair.of_one_weight()
    wide = pair.to(torch.float64)
    topk = 5 if shape == "topk" else None
    options = {"direction": direction, "beta": 0.3, "topk": topk, "tolerance": 0.0}
    upstream = move(torch.randn(pair.mask.shape, generator=rng, dtype=torch.float64))

    found = pair.divergence(**options)
    gradients = torch.autograd.grad((found * upstream).sum(), pair.leaves)

    expected = wide.expected(**options)
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit)
    clean = wide.with_clean_rows()
    exact = torch.autograd.grad((clean.expected(**options) * upstream).sum(), clean.leaves)
    for got, want in zip(gradients, exact, strict=True):
        assert oracle.relative(got, want) < of_gradient
    assert not gradients[0][~pair.mask].any()


@pytest.mark.parametrize(
    ("direction", "shape"), [("reverse", "one weight"), ("forward", "plain"), ("jsd", "transformed")]
)
@pytest.mark.drawn(1)
def test_the_mean_over_draws_is_exact_and_the_error_is_as_certified(make_pair, rng, hopper, direction, shape):
    near = 1.0 if shape == "one weight" else None
    pair = hopper(make_pair(24, 700, transformed=shape == "transformed", near=near))
    if near:
        pair = pair.of_one_weight()
    if pair.student.softcap:  # a softcap below the log-sum-exp keeps all pairs
        sides = replace(pair.student, softcap=40.0), replace(pair.reference, softcap=30.0)
        pair = Pair(*sides, pair.mask)
    upstream = hopper(torch.randn(24, generator=rng))
    options: dict[str, Any] = {"direction": direction, "beta": 0.3}
    draws, tolerance = 12, 24.0
    exact = torch.autograd.grad((pair.divergence(**options, tolerance=0.0) * upstream).sum(), pair.leaves)
    out = linear_kl(**pair.arguments, **options, tolerance=tolerance)

    found = []
    for draw in (*range(draws), 0):  # the size of the upstream gradient salts the draws anew
        given = upstream * 2.0**draw
        of_draw = torch.autograd.grad((out.divergence * given).sum(), pair.leaves, retain_graph=True)
        found.append([gradient / 2.0**draw for gradient in of_draw])

    assert all(map(torch.equal, found.pop(), found[0]))
    errors = [
        torch.stack([f - e for f in each]) for e, each in zip(exact, zip(*found, strict=True), strict=True)
    ]
    for error in errors:
        square = error.flatten(1).square().sum(1).mean()
        assert square > 0 and not error[0].isnan().any()
        # One is expected; what is left out on one side alone would make it as many as there are draws.
        assert draws * error.mean(0).square().sum() / square < 7
    density, of_hidden, of_weight, _ = out.certificate.values.tolist()
    assert density < 1 and 0 < of_weight < of_hidden <= tolerance * (1 + 1e-4)
    norm = (pair.tile_sizes(direction, 0.3, upstream).sum(1) / 2).norm() * BF16_ROUNDING
    for error, certified, largest in zip(
        errors, (of_hidden, of_weight), (pair.student.weight, pair.student.hidden[pair.mask]), strict=False
    ):
        measured = error.flatten(1).square().sum(1).mean().sqrt()
        assert measured <= 1.3 * certified * norm * largest.norm(dim=1).max()


@pytest.mark.parametrize("near", [None, 0.01], ids=["far", "near"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_bound_of_a_tiles_gradient_is_within_three_times_of_it(make_pair, hopper, direction, near):
    from grpo_fast.head import accelerated_divergence

    pair = hopper(make_pair(8, 700, near=near))
    call, _ = kl_call(**pair.arguments, direction=direction, beta=0.3)
    rows, saved = accelerated_divergence.forward(call, plan_of(call.student))

    exact = pair.tile_sizes(direction, 0.3, torch.ones_like(rows.divergence).double())[pair.mask]
    share = (saved.tile_lse - rows.logsumexp[:, None]).exp()[pair.mask].double()
    bound, size = share * saved.row_scale[pair.mask, None], saved.row_scale[pair.mask].double()
    assert ((bound >= exact * (1 - 1e-3) - 1e-7) & (bound <= 3 * exact * (1 + 1e-3) + 1e-6)).all()
    assert ((size <= exact.sum(1) * (1 + 1e-3)) & (3 * size >= exact.sum(1))).all()


def test_a_gradient_of_too_many_pairs_is_exact(make_pair, hopper, sparse_sizes):
    sparse_sizes(**QUICK, usual_density=0.01, most_density=0.01, least_pairs=1)
    pair = hopper(make_pair(8))
    exact = torch.autograd.grad(pair.divergence(tolerance=0.0).sum(), pair.leaves)

    out = linear_kl(**pair.arguments)

    assert all(map(torch.equal, torch.autograd.grad(out.divergence.sum(), pair.leaves), exact))
    assert out.certificate.values.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("near", [0.0, 1e-4, 1e-2])
@pytest.mark.parametrize("path", ["reference", "hopper"])
def test_equal_and_nearly_equal_heads_have_accurate_divergences(make_pair, request, direction, near, path):
    pair = make_pair(64, near=near)
    pair = pair if path == "reference" else request.getfixturevalue(path)(pair)

    found = pair.divergence(direction=direction)

    exact = pair.to(torch.float64).expected(direction)
    assert (found >= 0).all()
    if near == 0:
        found.sum().backward()
        assert not found.any() and not any(leaf.grad.any() for leaf in pair.leaves)
    assert ((found - exact).abs() <= (1e-5 * exact).clamp(min=1e-7)).all()


def test_the_divergence_of_the_top_is_between_zero_and_the_whole(make_pair):
    pair = make_pair(64)

    found = [pair.divergence(topk=k) for k in (1, 10, 100, 300)]

    for less, more in pairwise(found):
        assert ((less >= 0) & (less <= more * (1 + 1e-5))).all()
    torch.testing.assert_close(found[-1], pair.divergence())


@pytest.mark.parametrize(("beta", "limit"), [(0.0, "forward"), (1.0, "reverse")])
def test_jsd_of_beta_0_or_1_is_the_kl_as_in_trl(make_pair, beta, limit):
    pair = make_pair()

    assert torch.equal(pair.divergence(direction="jsd", beta=beta), pair.divergence(direction=limit))


@pytest.mark.parametrize("logits", [0, 30])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sure_rows_keep_their_digits(rng, direction, logits):
    hidden, weight, best = sure_rows(rng, float(logits))
    best, rows = best[:, None], len(hidden)
    reference = hidden.clone()
    reference[:, :7] += torch.randint(-2, 3, (rows, 7), generator=rng) / 16
    reference[:, 8:] += torch.diag(torch.randint(-2, 3, (rows,), generator=rng) / 2)
    hidden.requires_grad_()

    found = linear_kl(
        hidden, weight, torch.ones(rows).bool(), reference, weight, direction=direction
    ).divergence
    (gradient,) = torch.autograd.grad(found.sum(), hidden)

    def logprobs(x: Tensor) -> Tensor:
        z = x.detach().double() @ weight.double().T
        z = z - z.gather(1, best)
        return z - z.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True).exp().log1p()

    log_p, log_q = logprobs(hidden), logprobs(reference)
    p, q, d = log_p.exp(), log_q.exp(), log_p - log_q
    divergence = lambda p, d: (p * (torch.expm1(-d) + d)).sum(1, keepdim=True)  # noqa: E731
    if direction == "jsd":
        u = -torch.log1p(0.5 * torch.expm1(-d))
        exact = 0.5 * (divergence(p, u) + divergence(q, u - d))
        of_logits = 0.5 * p * (u - divergence(p, u))
    elif direction == "reverse":
        exact = divergence(p, d)
        of_logits = p * (d - exact)
    else:
        exact, of_logits = divergence(q, -d), -p * torch.expm1(-d)
    of_logits.scatter_(1, best, 0).scatter_(1, best, -of_logits.sum(1, keepdim=True))
    error = (found.double() - exact[:, 0]).abs()
    assert (error[:70] <= 1e-5 * exact[:70, 0]).all() and error.max() < 1e-7
    of_hidden = of_logits @ weight.double()
    assert ((gradient - of_hidden).norm(dim=1) <= 3e-5 * of_hidden.norm(dim=1))[:70].all()


@pytest.mark.parametrize("path", ["reference", "hopper"])
def test_a_row_without_overlap_is_infinite_and_the_others_are_not(make_pair, request, path):
    pair = make_pair(frozen=True)
    pair = pair if path == "reference" else request.getfixturevalue(path)(pair)
    out = torch.zeros(300, device=pair.mask.device)
    out[7] = -torch.inf
    sure = torch.where(torch.arange(300, device=out.device) == 9, 300.0, 0.0)  # all others underflow

    def divergence(bias: Tensor | None, ref_bias: Tensor | None, direction: str) -> Tensor:
        sides = replace(pair.student, bias=bias), replace(pair.reference, bias=ref_bias)
        return Pair(*sides, pair.mask).divergence(direction=direction)[pair.mask]

    assert divergence(None, out, "reverse").isinf().all() and divergence(out, None, "forward").isinf().all()
    assert divergence(out, out, "reverse").isfinite().all()
    low = out.clamp(min=-200)
    for bias, ref_bias, direction in ((None, out, "forward"), (None, out, "jsd"), (out, None, "jsd")):
        nearly = None if bias is None else low, None if ref_bias is None else low
        torch.testing.assert_close(divergence(bias, ref_bias, direction), divergence(*nearly, direction))
    found = divergence(sure, out, "reverse")
    assert found.isfinite().all() and torch.autograd.grad(found.sum(), pair.leaves)[0].isfinite().all()
    assert divergence(out, sure, "forward").isfinite().all()
    assert divergence(out, None, "reverse").isfinite().all()


@pytest.mark.parametrize("transformed", [False, True])
def test_a_policy_loss_takes_the_exact_kl_of_each_token(make_pair, rng, transformed):
    pair = make_pair(transformed=transformed).to(torch.float64).with_clean_rows()
    head, caps = pair.student, {"logit_scale": 0.75, "softcap": 4.0} if transformed else {}
    pair = pair._replace(reference=replace(pair.reference, temperature=head.temperature, **caps))
    targets = torch.where(pair.mask, torch.randint(300, (13,), generator=rng), -100)
    advantages = torch.randn(13, generator=rng, dtype=torch.float64)

    def loss(beta: float, **reference: Any) -> Any:
        return linear_grpo_loss(
            head.hidden, head.weight, targets, advantages, sequence_ids=torch.arange(13) // 5,
            config=GRPOLossConfig(beta=beta, kl_estimator="exact"), bias=head.bias,
            temperature=head.temperature, **caps, **reference,
        )  # fmt: skip

    heads = {f"ref_{name}": getattr(pair.reference, name) for name in ("hidden", "weight", "bias")}
    found, without = loss(0.2, **heads), loss(0.0)

    term = pair.expected("reverse")[pair.mask].mean()
    torch.testing.assert_close(found.metrics["kl"], term.detach())
    torch.testing.assert_close(found.loss - without.loss, 0.2 * term)
    totals = found.loss, without.loss + 0.2 * term
    torch.testing.assert_close(*(torch.autograd.grad(total, pair.leaves) for total in totals))
    for given, name in (({}, "ref_hidden"), (heads | {"ref_logprobs": advantages}, "ref_logprobs")):
        with pytest.raises(ValueError, match=name):
            loss(0.2, **given)
    with pytest.raises(ValueError, match="ref_hidden is not read with"):
        loss(0.0, **heads)
