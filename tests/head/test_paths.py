"""Every path of the head against full logits: plain torch, kernels by descriptors, kernels by pointers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_fast import linear_grpo_loss, linear_logprob
from grpo_fast.head import operator
from grpo_fast.head.plan import Device
from grpo_fast.objective import StepTotals

DIFFERENTIABLE = ("logprob", "entropy", "logsumexp", "mean_logit")
EVERY = (*DIFFERENTIABLE, "argmax_is_target", "log_sum_sq_probs")


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 257, 600])
@pytest.mark.parametrize("transformed", [False, True])
def test_statistics_match_full_logits(on_path, make_call, oracle, vocabulary, transformed):
    call = on_path(make_call((3, 7), vocabulary, 40, transformed=transformed))
    exact = oracle.statistics(call.to(torch.float64))

    for name, got in call.outputs(EVERY).items():
        torch.testing.assert_close(got, exact[name].to(got.dtype), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("names", [("logprob",), *((name,) for name in DIFFERENTIABLE[1:]), DIFFERENTIABLE])
@pytest.mark.parametrize("transformed", [False, True])
def test_exact_gradients_match_full_logits(on_path, make_call, make_upstream, oracle, names, transformed):
    call = on_path(make_call((3, 7), 600, 40, transformed=transformed))
    upstream = {name: on_path(gradient) for name, gradient in make_upstream((3, 7), names).items()}

    found = oracle.gradients(call, call.outputs(DIFFERENTIABLE, tolerance=0.0), upstream)

    for got, expected in zip(found, oracle.exact_gradients(call, upstream), strict=True):
        assert oracle.relative(got, expected) < 2e-5


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_float64_has_float64_gradients(make_call, make_upstream, oracle, name):
    call = make_call(dtype=torch.float64, transformed=True)
    upstream = make_upstream(call.targets.shape, (name,))

    found = oracle.gradients(call, call.outputs(EVERY), upstream)

    for a, b in zip(found, oracle.exact_gradients(call, upstream), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tolerance", [1.0, 0.0])
def test_half_precision_gradients_err_no_more_than_rounded_logit_gradients_do(
    on_path, make_call, make_upstream, oracle, dtype, tolerance
):
    call = on_path(make_call((30,), 600, 40, dtype=dtype, spread=6.0))
    upstream = {name: 1e-4 * on_path(gradient) for name, gradient in make_upstream((30,)).items()}
    plain = oracle.gradients(call, oracle.statistics(call), upstream)

    found = oracle.gradients(call, call.outputs(tolerance=tolerance), upstream)

    for got, straightforward, exact in zip(found, plain, oracle.exact_gradients(call, upstream), strict=True):
        assert oracle.relative(got, exact) <= oracle.relative(straightforward, exact) + 2.5e-3


@pytest.mark.parametrize(("tolerance", "transformed"), [(1.0, True), (0.0, False)])
def test_a_frozen_side_costs_the_other_nothing(
    on_path, make_call, make_upstream, oracle, tolerance, transformed
):
    call = on_path(make_call((29,), transformed=transformed))
    upstream = on_path(make_upstream((29,))["logprob"])
    expected = oracle.gradients(call, call.outputs(tolerance=tolerance), {"logprob": upstream})
    leaves = dict(zip(("hidden", "weight"), expected, strict=False))

    for name, gradient in leaves.items():
        for parameter in call.parameters:
            parameter.requires_grad_(parameter is getattr(call, name))
            parameter.grad = None
        (call.outputs(tolerance=tolerance)["logprob"] * upstream).sum().backward()

        torch.testing.assert_close(getattr(call, name).grad, gradient, rtol=1e-4, atol=1e-5)
        assert sum(parameter.grad is not None for parameter in call.parameters) == 1


@pytest.mark.parametrize(("frozen", "recompute"), [(False, False), (True, True)])
def test_a_second_backward_through_the_graph_gives_the_same_gradient(on_path, make_call, frozen, recompute):
    call = on_path(make_call())
    call.weight.requires_grad_(not frozen)
    loss = call.outputs(recompute=recompute)["logprob"].sum()

    first, second = (torch.autograd.grad(loss, call.hidden, retain_graph=True)[0] for _ in range(2))

    assert torch.equal(first, second)


@pytest.mark.parametrize("tolerance", [1.0, 0.0])
def test_ignored_rows_are_zero_whatever_they_hold(on_path, make_call, tolerance):
    call = on_path(make_call())
    ignored = call.targets == -100
    with torch.no_grad():
        call.hidden[ignored] = torch.nan

    found = call.outputs(EVERY, tolerance=tolerance)
    for names in (("logprob",), DIFFERENTIABLE):
        loss = sum(found[name].sum() for name in names)
        of_hidden, of_weight = torch.autograd.grad(loss, call.parameters, retain_graph=True)

        assert all((value[ignored] == 0).all() for value in found.values())
        assert (of_hidden[ignored] == 0).all()
        assert not of_weight.isnan().any()


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("options", [{}, {"tolerance": 1.0}, {"tolerance": 0.0}, {"recompute": False}])
def test_no_token_and_one_token(on_path, make_call, rows, options):
    call = on_path(make_call((rows,)))

    call.outputs(("logprob", "entropy"), **options)["logprob"].sum().backward()

    assert call.hidden.grad.shape == (rows, 24)
    assert call.weight.grad.any() == (rows > 0)


def test_every_row_ignored_gives_zero(on_path, make_call):
    call = on_path(make_call())
    call = replace(call, targets=torch.full_like(call.targets, -100))

    logprob = call.outputs()["logprob"]
    logprob.sum().backward()

    assert not any(found.any() for found in (logprob, call.hidden.grad, call.weight.grad))


def test_strided_operands_give_the_same_numbers(on_path, make_call):
    call = on_path(make_call())
    wide = torch.zeros(13, 48, device=call.hidden.device)
    wide[:, ::2] = call.hidden.detach()
    turned = call.weight.detach().t().contiguous().t()

    strided = replace(call, hidden=wide[:, ::2], weight=turned).outputs()["logprob"]

    torch.testing.assert_close(strided, call.outputs()["logprob"], rtol=1e-5, atol=1e-5)


def test_two_runs_are_bit_equal(on_path, make_call):
    call = on_path(make_call((30,), 600, 40, dtype=torch.bfloat16))

    def run() -> tuple[torch.Tensor, ...]:
        logprob = call.outputs(tolerance=1.0, deterministic=True)["logprob"]
        return logprob, *torch.autograd.grad(logprob.sum(), call.parameters)

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 0.0), (torch.bfloat16, 1.0)])
def test_the_weights_gradient_is_added_where_the_caller_says(
    on_path, make_call, oracle, rng, kind, tolerance
):
    call = on_path(make_call((20,)))
    (expected,) = torch.autograd.grad(call.outputs(tolerance=tolerance)["logprob"].sum(), call.weight)
    weight_grad = on_path(torch.randn(call.weight.shape, generator=rng).to(kind))
    before = weight_grad.double()

    for _ in range(2):
        call.outputs(tolerance=tolerance, weight_grad=weight_grad)["logprob"].sum().backward()

    assert call.weight.grad is None
    limit = 1e-6 if kind == torch.float32 else 2**-7
    assert oracle.relative(weight_grad, before + 2 * expected.double()) < limit


@pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"recompute": False}])
def test_a_compiled_caller_sees_one_operator_and_the_same_numbers(on_path, make_call, options):
    call = on_path(make_call())
    temperature = torch.tensor(0.7, dtype=torch.float64, device=call.hidden.device)

    def loss(hidden, weight, targets, temperature):
        given = {"temperature": temperature, "outputs": ("entropy",)} | options
        out = linear_logprob(2 * hidden, weight, targets, **given)
        return (out.logprob + out.entropy).sum() * torch.tensor(0.5, dtype=torch.float64)

    arguments = (call.hidden, call.weight, call.targets, temperature)
    expected = torch.autograd.grad(loss(*arguments), call.parameters)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")

    for a, b in zip(torch.autograd.grad(compiled(*arguments), call.parameters), expected, strict=True):
        assert torch.equal(a, b)


def packed_batch(on_kernels, rng) -> dict[str, object]:
    return {
        "advantages": on_kernels(torch.randn(24, generator=rng)),
        "sequence_ids": on_kernels(torch.arange(24) // 4),
        "old_logprobs": on_kernels(torch.randn(24, generator=rng) - 3),
        "num_sequences": 6,
        "tolerance": 0.0,
    }


def test_the_policy_loss_is_that_of_the_reference_path(on_kernels, make_call, rng, monkeypatch):
    call = on_kernels(make_call((24,), spread=1.0))
    batch = packed_batch(on_kernels, rng)

    def run() -> tuple[torch.Tensor, ...]:
        loss = linear_grpo_loss(call.hidden, call.weight, call.targets, **batch).loss
        return loss, *torch.autograd.grad(loss, call.parameters)

    found = run()
    monkeypatch.setattr(operator, "device_facts", lambda kind, index: Device("cpu"))

    for a, b in zip(found, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_compiled_policy_loss_is_one_graph_with_the_same_numbers(on_kernels, make_call, rng):
    call = on_kernels(make_call((24,)))
    batch = packed_batch(on_kernels, rng) | {"totals": StepTotals(24, 6)}

    def loss(hidden, weight):
        return linear_grpo_loss(hidden, weight, call.targets, **batch).loss

    arguments = (call.hidden, call.weight)
    expected = torch.autograd.grad(loss(*arguments), arguments)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")

    for a, b in zip(torch.autograd.grad(compiled(*arguments), arguments), expected, strict=True):
        assert torch.equal(a, b)


def test_the_default_backward_certifies_what_it_left_out(on_kernels, make_call, oracle):
    call = on_kernels(make_call((40,), 2000, 40, spread=8.0))
    exact, _ = oracle.exact_gradients(call, {"logprob": torch.ones(40, device=call.hidden.device)})

    out = linear_logprob(call.hidden, call.weight, call.targets)
    assert out.certificate.density.isnan()
    out.logprob.sum().backward()

    assert 0 < out.certificate.density < 1
    assert out.certificate.error_bound <= 1
    assert oracle.relative(call.hidden.grad, exact) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("names", [("logprob",), ("logprob", "logsumexp"), DIFFERENTIABLE])
def test_what_the_forward_kept_gives_the_exact_gradient(
    on_kernels, make_call, make_upstream, oracle, names, dtype
):
    call = on_kernels(make_call((30,), 600, 40, dtype=dtype, spread=6.0, bias=True))
    call = replace(call, temperature=0.7, logit_scale=1.25)
    with torch.no_grad():
        call.hidden[call.targets == -100] = torch.nan
    clean = replace(call, hidden=call.hidden.detach().nan_to_num().requires_grad_())
    upstream = {name: 1e-4 * on_kernels(g) for name, g in make_upstream((30,), names).items()}

    found = oracle.gradients(call, call.outputs(names, recompute=False), upstream)

    # Two roundings of a logit gradient, and that of the result.
    limit = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 2e-3}[dtype]
    for value, expected in zip(found, oracle.exact_gradients(clean, upstream), strict=True):
        assert oracle.relative(value, expected) < limit


def test_keeping_changes_nothing_where_there_is_a_softcap(on_kernels, make_call):
    call = on_kernels(make_call(transformed=True))

    kept, computed = (
        torch.autograd.grad(call.outputs(tolerance=0.0, recompute=r)["logprob"].sum(), call.parameters)
        for r in (False, True)
    )

    for a, b in zip(kept, computed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture
def crowded(on_kernels, make_call, monkeypatch):
    """Makes a call whose last 8 of 16 rows are live in all of 8 tiles; and the rows that go the dense way."""
    from grpo_fast.head import accelerated
    from grpo_fast.head.tuning import sizes_for

    select, dense, dense_rows = accelerated.select_pairs, accelerated._dense, []

    def counted(rows, *rest):
        dense_rows.append(rows.logprob.numel())
        return dense(rows, *rest)

    def make(**limits):
        shipped = sizes_for((9, 0), torch.float32, 16, True).sparse
        config = replace(shipped, least_pairs=1, least_entries=1, **limits)
        monkeypatch.setattr(accelerated, "select_pairs", lambda *a, **k: select(*a, **k | {"config": config}))
        monkeypatch.setattr(accelerated, "_dense", counted)
        call = make_call((16,), 1000, 16, spread=30.0)
        with torch.no_grad():
            call.hidden[8:] *= 0.01
        return on_kernels(call), dense_rows

    return make


@pytest.mark.parametrize(
    ("limits", "calls"),
    [
        ({"pair_density": 0.95, "entries_per_row": 1000}, 0),
        ({"pair_density": 0.3, "entries_per_row": 1000}, 1),
        ({"pair_density": 0.95, "entries_per_row": 200}, 1),
        ({"pair_density": 0.95, "entries_per_row": 0}, 2),
    ],
    ids=["all fits", "pairs overflow", "entries overflow", "the other rows' entries overflow too"],
)
def test_rows_that_are_live_everywhere_go_the_dense_way_only_where_a_list_overflows(
    crowded, oracle, limits, calls
):
    call, dense_rows = crowded(**limits)
    ones = {"logprob": torch.ones(16, device=call.hidden.device)}
    exact = oracle.exact_gradients(call, ones)

    out = linear_logprob(call.hidden, call.weight, call.targets)
    found = oracle.gradients(call, {"logprob": out.logprob}, ones)

    assert len(dense_rows) == calls
    assert calls == 0 or 6 <= dense_rows[0] < 16  # 6 of the last 8 have a target
    assert calls < 2 or dense_rows[1] == 16
    assert 0.3 < out.certificate.density < 1
    assert out.certificate.error_bound <= 1
    if calls:
        assert oracle.relative(found[0][8:], exact[0][8:]) < 2e-5  # exact where dense
    for got, expected in zip(found, exact, strict=True):
        assert oracle.relative(got, expected) < 5e-3


@pytest.mark.parametrize(("pair_density", "fits"), [(0.95, True), (0.3, False)])
def test_a_captured_backward_asks_nobody_and_gives_nan_where_a_list_overflows(
    crowded, monkeypatch, pair_density, fits
):
    from grpo_fast.head import accelerated

    call, dense_rows = crowded(pair_density=pair_density, entries_per_row=1000)

    def gradients():
        logprob = linear_logprob(call.hidden, call.weight, call.targets).logprob
        return torch.autograd.grad(logprob.sum(), call.parameters)

    expected = gradients()
    dense_rows.clear()
    monkeypatch.setattr(accelerated, "_capturing", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: pytest.fail("a number was asked for"))

    captured = gradients()

    assert not dense_rows
    for got, eager in zip(captured, expected, strict=True):
        assert torch.equal(got, eager) if fits else got.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_a_captured_step_replays_on_new_numbers(on_kernels, make_call, oracle, tolerance):
    call = on_kernels(make_call((64,), 600, 64, dtype=torch.bfloat16))

    def step() -> tuple[torch.Tensor, ...]:
        logprob = linear_logprob(call.hidden, call.weight, call.targets, tolerance=tolerance).logprob
        return logprob, *torch.autograd.grad(logprob.sum(), call.parameters)

    aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        call.hidden.copy_(call.hidden.flip(0))

    graph.replay()

    for got, expected in zip(captured, step(), strict=True):
        assert oracle.relative(got, expected) < 2**-7
