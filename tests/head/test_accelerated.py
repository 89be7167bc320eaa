"""The Triton path end to end, interpreted where there is no GPU, against full logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_fast import linear_grpo_loss, linear_logprob
from grpo_fast.head import operator
from grpo_fast.head.plan import Device
from grpo_fast.objective import StepTotals

pytest.importorskip("triton")

DIFFERENTIABLE = ("logprob", "entropy", "logsumexp", "mean_logit")
EVERY = (*DIFFERENTIABLE, "argmax_is_target", "log_sum_sq_probs")
HOPPER = Device("cuda", (9, 0), shared_memory=232_448, has_triton=True)
AMPERE = Device("cuda", (8, 0), shared_memory=166_912, has_triton=True)


@pytest.fixture(params=[HOPPER, AMPERE], ids=["descriptors", "pointers"])
def on_device(request, device, monkeypatch):
    """Makes the head take the Triton path, and moves calls there."""
    if device.type == "cpu":
        monkeypatch.setattr(operator, "device_facts", lambda kind, index: request.param)

    def move(call):
        def leaf(tensor):
            return None if tensor is None else tensor.detach().to(device).requires_grad_()

        temperature = call.temperature
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.to(device)
        return replace(
            call,
            hidden=leaf(call.hidden),
            weight=leaf(call.weight),
            bias=leaf(call.bias),
            targets=call.targets.to(device),
            temperature=temperature,
        )

    return move


def outputs(call, names, **options) -> dict[str, torch.Tensor]:
    out = linear_logprob(call.hidden, call.weight, call.targets, outputs=names, **call.options, **options)
    return {name: getattr(out, name) for name in names}


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 257, 600])
@pytest.mark.parametrize("transformed", [False, True])
def test_statistics_match_full_logits(on_device, make_call, oracle, vocabulary, transformed):
    call = on_device(make_call((3, 7), vocabulary, 40, transformed=transformed))
    exact = oracle.statistics(call.to(torch.float64))

    for name, got in outputs(call, EVERY).items():
        expected = exact[name].to(got.dtype)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("names", [("logprob",), DIFFERENTIABLE])
@pytest.mark.parametrize("transformed", [False, True])
def test_exact_gradients_match_full_logits(on_device, make_call, make_upstream, oracle, names, transformed):
    call = on_device(make_call((3, 7), 600, 40, transformed=transformed))
    upstream = {k: v.to(call.hidden.device) for k, v in make_upstream((3, 7), names).items()}
    exact_call = call.to(torch.float64)
    exact = oracle.gradients(exact_call, oracle.statistics(exact_call), upstream)

    found = oracle.gradients(call, outputs(call, names, tolerance=0.0), upstream)

    for got, expected in zip(found, exact, strict=True):
        assert relative(got, expected) < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_half_precision_gradients_err_no_more_than_rounded_logit_gradients_do(
    on_device, make_call, make_upstream, oracle, dtype, tolerance
):
    call = on_device(make_call((30,), 600, 40, dtype=dtype, spread=6.0))
    upstream = {k: 1e-4 * v.to(call.hidden.device) for k, v in make_upstream((30,)).items()}
    exact_call = call.to(torch.float64)
    exact = oracle.gradients(exact_call, oracle.statistics(exact_call), upstream)
    plain = oracle.gradients(call, oracle.statistics(call), upstream)

    found = oracle.gradients(call, outputs(call, ("logprob",), tolerance=tolerance), upstream)

    for got, straightforward, expected in zip(found, plain, exact, strict=True):
        assert relative(got, expected) <= relative(straightforward, expected) + 2.5e-3


def test_the_default_backward_certifies_what_it_left_out(on_device, make_call, oracle):
    call = on_device(make_call((40,), 2000, 40, spread=8.0))
    exact_call = call.to(torch.float64)
    exact, _ = oracle.gradients(
        exact_call, oracle.statistics(exact_call), {"logprob": torch.ones(40, device=call.hidden.device)}
    )

    out = linear_logprob(call.hidden, call.weight, call.targets)
    assert out.certificate.density.isnan()
    out.logprob.sum().backward()

    assert 0 < out.certificate.density < 1
    assert out.certificate.error_bound <= 1
    assert relative(call.hidden.grad, exact) < 5e-3


def test_a_frozen_head_asks_for_no_weight_gradient(on_device, make_call):
    call = on_device(make_call())
    call.weight.requires_grad_(False)

    outputs(call, ("logprob",))["logprob"].sum().backward()

    assert call.hidden.grad.abs().sum() > 0
    assert call.weight.grad is None


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_ignored_rows_are_zero_whatever_they_hold(on_device, make_call, tolerance):
    call = on_device(make_call())
    ignored = call.targets == -100
    with torch.no_grad():
        call.hidden[ignored] = torch.nan

    logprob = outputs(call, ("logprob",), tolerance=tolerance)["logprob"]
    logprob.sum().backward()

    assert (logprob[ignored] == 0).all()
    assert (call.hidden.grad[ignored] == 0).all()
    assert not call.weight.grad.isnan().any()


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_no_token_and_one_token(on_device, make_call, rows, tolerance):
    call = on_device(make_call((rows,)))

    outputs(call, ("logprob", "entropy"), tolerance=tolerance)["logprob"].sum().backward()

    assert call.hidden.grad.shape == (rows, 24)
    assert call.weight.grad.any() == (rows > 0)


def test_every_row_ignored_gives_zero(on_device, make_call):
    call = on_device(make_call())

    out = linear_logprob(call.hidden, call.weight, torch.full_like(call.targets, -100))
    out.logprob.sum().backward()

    assert not out.logprob.any()
    assert not call.hidden.grad.any()
    assert not call.weight.grad.any()


def test_strided_operands_give_the_same_numbers(on_device, make_call):
    call = on_device(make_call())
    wide = torch.zeros(13, 48, device=call.hidden.device)
    wide[:, ::2] = call.hidden.detach()
    turned = call.weight.detach().t().contiguous().t()

    strided = linear_logprob(wide[:, ::2], turned, call.targets).logprob

    torch.testing.assert_close(strided, outputs(call, ("logprob",))["logprob"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_two_runs_are_bit_equal(on_device, make_call, tolerance):
    call = on_device(make_call((30,), 600, 40, dtype=torch.bfloat16))

    def run() -> tuple[torch.Tensor, ...]:
        logprob = outputs(call, ("logprob",), tolerance=tolerance, deterministic=True)["logprob"]
        return logprob, *torch.autograd.grad(logprob.sum(), call.parameters)

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_the_policy_loss_is_that_of_the_reference_path(on_device, make_call, rng, monkeypatch):
    call = on_device(make_call((24,), spread=1.0))
    target = call.hidden.device
    batch = {
        "advantages": torch.randn(24, generator=rng).to(target),
        "sequence_ids": (torch.arange(24) // 4).to(target),
        "old_logprobs": (torch.randn(24, generator=rng) - 3).to(target),
        "num_sequences": 6,
    }

    def run() -> tuple[torch.Tensor, ...]:
        out = linear_grpo_loss(call.hidden, call.weight, call.targets, **batch, tolerance=0.0)
        return out.loss, *torch.autograd.grad(out.loss, call.parameters)

    found = run()
    monkeypatch.setattr(operator, "device_facts", lambda kind, index: Device("cpu"))

    for a, b in zip(found, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_too_many_live_pairs_are_left_to_the_dense_path(on_device, make_call, oracle, monkeypatch):
    from grpo_fast.kernels.sparse_config import FULL

    from grpo_fast.head import accelerated

    tight = replace(FULL, least_pairs=1)
    select = accelerated.select_pairs
    monkeypatch.setattr(accelerated, "select_pairs", lambda *a, **k: select(*a, **k | {"config": tight}))
    call = on_device(make_call((30,), 600, 40, spread=0.5))
    exact_call = call.to(torch.float64)
    ones = {"logprob": torch.ones(30, device=call.hidden.device)}
    exact = oracle.gradients(exact_call, oracle.statistics(exact_call), ones)

    found = oracle.gradients(call, outputs(call, ("logprob",)), ones)

    for got, expected in zip(found, exact, strict=True):
        assert relative(got, expected) < 2e-5


def test_a_compiled_caller_sees_the_same_shapes_and_numbers(on_device, make_call):
    call = on_device(make_call())

    def loss(hidden, weight, targets):
        return linear_logprob(hidden, weight, targets, tolerance=0.0).logprob.sum()

    arguments = (call.hidden, call.weight, call.targets)
    expected = torch.autograd.grad(loss(*arguments), call.parameters)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*arguments), call.parameters)

    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tolerance", [None, 0.0])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_weights_gradient_is_added_where_the_caller_says(on_device, make_call, rng, kind, tolerance):
    call = on_device(make_call((20,)))
    expected = torch.autograd.grad(
        outputs(call, ("logprob",), tolerance=tolerance)["logprob"].sum(), call.weight
    )
    weight_grad = torch.randn(call.weight.shape, generator=rng).to(call.hidden.device, kind)
    exact = weight_grad.double() + expected[0].double()

    outputs(call, ("logprob",), tolerance=tolerance, weight_grad=weight_grad)["logprob"].sum().backward()

    assert call.weight.grad is None
    assert relative(weight_grad, exact) < (1e-6 if kind == torch.float32 else 2**-8)


@pytest.fixture
def crowded(on_device, make_call, monkeypatch):
    """Makes a call whose last 8 of 16 rows are live in all of 8 tiles; and the rows that go the dense way."""
    from grpo_fast.kernels.sparse_config import FULL

    from grpo_fast.head import accelerated

    select, dense, dense_rows = accelerated.select_pairs, accelerated._dense, []

    def counted(rows, *rest):
        dense_rows.append(rows.logprob.numel())
        return dense(rows, *rest)

    def make(**limits):
        config = replace(FULL, least_pairs=1, least_entries=1, **limits)
        monkeypatch.setattr(accelerated, "select_pairs", lambda *a, **k: select(*a, **k | {"config": config}))
        monkeypatch.setattr(accelerated, "_dense", counted)
        call = make_call((16,), 1000, 16, spread=30.0)
        with torch.no_grad():
            call.hidden[8:] *= 0.01
        return on_device(call), dense_rows

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
    exact_call = call.to(torch.float64)
    ones = {"logprob": torch.ones(16, device=call.hidden.device)}
    exact = oracle.gradients(exact_call, oracle.statistics(exact_call), ones)

    out = linear_logprob(call.hidden, call.weight, call.targets)
    found = oracle.gradients(call, {"logprob": out.logprob}, ones)

    assert len(dense_rows) == calls
    assert calls == 0 or 6 <= dense_rows[0] < 16  # 6 of the last 8 have a target
    assert calls < 2 or dense_rows[1] == 16
    assert 0.3 < out.certificate.density < 1
    assert out.certificate.error_bound <= 1
    if calls:
        assert relative(found[0][8:], exact[0][8:]) < 2e-5  # exact where dense
    for got, expected in zip(found, exact, strict=True):
        assert relative(got, expected) < 5e-3


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
def test_a_captured_step_replays_on_new_numbers(on_device, make_call, tolerance):
    call = on_device(make_call((64,), 600, 64, dtype=torch.bfloat16))

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
        assert relative(got, expected) < 2**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("names", [("logprob",), ("logprob", "logsumexp"), DIFFERENTIABLE])
def test_what_the_forward_kept_gives_the_exact_gradient(
    on_device, make_call, make_upstream, oracle, names, dtype
):
    call = on_device(make_call((30,), 600, 40, dtype=dtype, spread=6.0, bias=True))
    call = replace(call, temperature=0.7, logit_scale=1.25)
    with torch.no_grad():
        call.hidden[call.targets == -100] = torch.nan
    clean = replace(call, hidden=call.hidden.detach().nan_to_num().requires_grad_())
    upstream = {k: 1e-4 * v.to(call.hidden.device) for k, v in make_upstream((30,), names).items()}
    exact_call = clean.to(torch.float64)
    exact = oracle.gradients(exact_call, oracle.statistics(exact_call), upstream)

    got = outputs(call, names, recompute=False)
    found = oracle.gradients(call, got, upstream)

    # Two roundings of a logit gradient, and that of the result.
    limit = 1e-5 if dtype == torch.float32 else 6e-3 if dtype == torch.bfloat16 else 2e-3
    for value, expected in zip(found, exact, strict=True):
        assert relative(value, expected) < limit


def test_what_was_kept_serves_two_backwards_and_a_frozen_head(on_device, make_call):
    call = on_device(make_call((20,)))
    expected = torch.autograd.grad(outputs(call, ("logprob",), tolerance=0.0)["logprob"].sum(), call.hidden)
    call.weight.requires_grad_(False)

    loss = outputs(call, ("logprob",), recompute=False)["logprob"].sum()
    first = torch.autograd.grad(loss, call.hidden, retain_graph=True)
    second = torch.autograd.grad(loss, call.hidden)

    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1])
def test_keeping_works_with_a_softcap_and_with_hardly_a_token(on_device, make_call, rows):
    call = on_device(make_call((rows,), transformed=True))

    out = outputs(call, ("logprob",), tolerance=0.0, recompute=False)["logprob"]
    kept = torch.autograd.grad(out.sum(), call.parameters)
    computed = torch.autograd.grad(
        outputs(call, ("logprob",), tolerance=0.0)["logprob"].sum(), call.parameters
    )

    for a, b in zip(kept, computed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_compiled_caller_may_keep_too(on_device, make_call):
    call = on_device(make_call())

    def loss(hidden, weight, targets):
        return linear_logprob(hidden, weight, targets, recompute=False).logprob.sum()

    arguments = (call.hidden, call.weight, call.targets)
    expected = torch.autograd.grad(loss(*arguments), call.parameters)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")

    for a, b in zip(torch.autograd.grad(compiled(*arguments), call.parameters), expected, strict=True):
        assert torch.equal(a, b)


def test_a_compiled_policy_loss_is_one_graph_with_the_same_numbers(on_device, make_call, rng):
    call = on_device(make_call((24,)))
    device = call.hidden.device
    batch = {
        "advantages": torch.randn(24, generator=rng).to(device),
        "sequence_ids": (torch.arange(24) // 4).to(device),
        "old_logprobs": (torch.randn(24, generator=rng) - 3).to(device),
        "num_sequences": 6,
        "totals": StepTotals(24, 6),
    }

    def loss(hidden, weight):
        return linear_grpo_loss(hidden, weight, call.targets, **batch, tolerance=0.0).loss

    arguments = (call.hidden, call.weight)
    expected = torch.autograd.grad(loss(*arguments), arguments)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")

    for a, b in zip(torch.autograd.grad(compiled(*arguments), arguments), expected, strict=True):
        assert torch.equal(a, b)
