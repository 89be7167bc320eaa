"""Every path of the head against full logits: plain torch, descriptor kernels, pointer kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_fast import GRPOLossConfig, linear_grpo_loss, linear_logprob
from grpo_fast.head import operator, plan
from grpo_fast.head.plan import Device
from grpo_fast.objective import StepTotals

DIFFERENTIABLE = ("logprob", "entropy", "logsumexp", "mean_logit")
EVERY = (*DIFFERENTIABLE, "argmax_is_target", "log_sum_sq_probs")


@pytest.mark.parametrize(
    ("vocabulary", "transformed", "names"),
    [
        (1, False, ("mean_logit",)),
        (127, True, ("entropy",)),
        (128, False, DIFFERENTIABLE),
        (129, True, ("logsumexp",)),
        (257, False, ("logprob",)),
        (600, True, DIFFERENTIABLE),
        (600, True, ("logprob",)),
    ],
)
def test_statistics_and_exact_gradients_are_those_of_full_logits(
    on_path, make_call, make_upstream, oracle, vocabulary, transformed, names
):
    call = on_path(make_call((3, 7), vocabulary, 40, transformed=transformed))
    upstream = {name: on_path(gradient) for name, gradient in make_upstream((3, 7), names).items()}
    exact = oracle.statistics(call.to(torch.float64))

    found = call.outputs(EVERY, tolerance=0.0)

    for name, got in found.items():
        torch.testing.assert_close(got, exact[name].to(got.dtype), rtol=1e-5, atol=1e-5, msg=name)
    gradients = oracle.gradients(call, found, upstream)
    for got, expected in zip(gradients, oracle.exact_gradients(call, upstream), strict=True):
        assert oracle.relative(got, expected) < 2e-5


@pytest.mark.parametrize("tolerance", [0.0, 1.0])
def test_the_small_slopes_of_a_saturated_softcap_keep_their_digits(
    on_path, make_call, make_upstream, oracle, tolerance
):
    call = make_call((1,), 100, 16, transformed=True)
    with torch.no_grad():
        call.hidden.zero_()[0, 0] = 40.0
        call.weight[:, 0].uniform_(0.5, 1.0).mul_(torch.randn(100).sign())  # 4e-5 of the slope, and less
    call, upstream = on_path(call), {"logprob": on_path(make_upstream((1,))["logprob"])}
    exact = oracle.exact_gradients(call, upstream)

    found = oracle.gradients(call, call.outputs(tolerance=tolerance), upstream)

    torch.testing.assert_close(found[2].double(), exact[2], rtol=1e-4, atol=0)
    call.weight.requires_grad_(False), call.bias.requires_grad_(False)
    (frozen,) = torch.autograd.grad(call.outputs(tolerance=0.0)["logprob"], call.hidden, upstream["logprob"])
    assert oracle.relative(frozen, exact[0]) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 1.0), (torch.float16, 0.0), (torch.bfloat16, 0.0)]
)
@pytest.mark.drawn(4)
def test_half_precision_gradients_err_as_rounded_logit_gradients(
    on_path, make_call, make_upstream, oracle, dtype, tolerance
):
    call = on_path(make_call((30,), 600, 40, dtype=dtype, spread=6.0))
    upstream = {name: 1e-4 * on_path(gradient) for name, gradient in make_upstream((30,)).items()}
    plain = oracle.gradients(call, oracle.statistics(call), upstream)

    found = oracle.gradients(call, call.outputs(tolerance=tolerance), upstream)

    for got, straightforward, exact in zip(found, plain, oracle.exact_gradients(call, upstream), strict=True):
        assert oracle.relative(got, exact) <= oracle.relative(straightforward, exact) + 2.5e-3


@pytest.mark.parametrize(("tolerance", "transformed"), [(1.0, True), (0.0, False)])
@pytest.mark.drawn(4)
def test_a_frozen_side_costs_the_other_nothing(
    on_path, make_call, make_upstream, oracle, tolerance, transformed
):
    call = on_path(make_call((9,), 200, transformed=transformed))
    upstream = on_path(make_upstream((9,))["logprob"])
    expected = oracle.gradients(call, call.outputs(tolerance=tolerance), {"logprob": upstream})

    for name, gradient in zip(("hidden", "weight"), expected, strict=False):
        for parameter in call.parameters:
            parameter.requires_grad_(parameter is getattr(call, name))
            parameter.grad = None
        (call.outputs(tolerance=tolerance)["logprob"] * upstream).sum().backward()

        torch.testing.assert_close(getattr(call, name).grad, gradient, rtol=1e-4, atol=1e-5)
        assert sum(parameter.grad is not None for parameter in call.parameters) == 1


@pytest.mark.parametrize(("frozen", "recompute"), [(False, False), (True, True)])
def test_a_second_backward_through_the_graph_gives_the_same_gradient(on_path, make_call, frozen, recompute):
    call = on_path(make_call((5,), 150))
    call.weight.requires_grad_(not frozen)
    loss = call.outputs(recompute=recompute, tolerance=0.0)["logprob"].sum()

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
    nothing = replace(call, targets=torch.full_like(call.targets, -100)).outputs(tolerance=tolerance)
    assert not nothing["logprob"].any()
    assert not any(g.any() for g in torch.autograd.grad(nothing["logprob"].sum(), call.parameters))


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("options", [{}, {"recompute": False}])
def test_no_token_and_one_token(on_path, make_call, rows, options):
    call = on_path(make_call((rows,)))

    call.outputs(("logprob", "entropy"), **options)["logprob"].sum().backward()

    assert call.hidden.grad.shape == (rows, 24)
    assert call.weight.grad.any() == (rows > 0)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy a tensor into other strides among garbage; `overlapping` changes its values, too."""
    if layout == "overlapping":
        return tensor.as_strided(tensor.shape, (0,) if tensor.dim() == 1 else (8, 1))
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    garbage = torch.nan if tensor.is_floating_point() else 7
    wide = tensor.new_full([2 * size for size in tensor.shape], garbage)
    inside = slice(None, None, 2) if layout == "every second" else slice(1, None)
    view = wide[(inside,) * tensor.dim()][tuple(slice(size) for size in tensor.shape)]
    return view.copy_(tensor)


@pytest.mark.parametrize("layout", ["every second", "sliced", "transposed", "overlapping"])
@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({"tolerance": 0.0}, ("hidden", "weight", "bias")),
        ({"tolerance": 1e-3}, ("hidden", "weight", "bias")),
        ({"recompute": False}, ("hidden", "weight", "bias")),
        ({"tolerance": 0.0}, ("hidden",)),
    ],
    ids=["exact", "sparse", "kept", "frozen"],
)
@pytest.mark.drawn(8)
def test_operands_of_any_strides_give_float64_values_and_gradients(
    on_path, make_call, make_upstream, oracle, layout, options, trained
):
    call = on_path(make_call((13,), 300, 24, transformed=True))
    call = replace(call, softcap=None)  # with one nothing is kept
    call = replace(
        call,
        **{
            name: laid_out(operand.detach(), layout).requires_grad_(name in trained)
            for name, operand in vars(call).items()
            if isinstance(operand, torch.Tensor)
        },
    )
    upstream = {"logprob": laid_out(on_path(make_upstream((13,))["logprob"]), layout)}
    exact = oracle.exact_gradients(call, upstream)

    found = call.outputs(**options)["logprob"]

    expected = oracle.statistics(call.to(torch.float64))["logprob"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    parameters = [getattr(call, name) for name in trained]
    gradients = torch.autograd.grad(found, parameters, upstream["logprob"])
    for got, wanted in zip(gradients, exact, strict=False):
        assert oracle.relative(got, wanted) < 1e-4


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.float32, {"tolerance": 0.0}),
        (torch.bfloat16, {"tolerance": 1.0}),
        (torch.bfloat16, {"recompute": False}),
    ],
)
@pytest.mark.drawn(5)
def test_the_weights_gradient_is_added_where_the_caller_says(on_path, make_call, oracle, rng, kind, options):
    call = on_path(make_call((12,), 200))
    (expected,) = torch.autograd.grad(call.outputs(**options)["logprob"].sum(), call.weight)
    weight_grad = on_path(torch.randn(call.weight.shape, generator=rng).to(kind))
    before = weight_grad.double()

    call.outputs(**options, weight_grad=weight_grad)["logprob"].sum().backward()

    assert call.weight.grad is None
    limit = 1e-6 if kind == torch.float32 else 2**-7
    assert oracle.relative(weight_grad, before + expected.double()) < limit


def test_a_compiled_caller_sees_one_operator_and_the_same_numbers(on_path, make_call):
    call = on_path(make_call())
    temperature = torch.tensor(0.7, dtype=torch.float64, device=call.hidden.device)

    def loss(hidden, weight, targets, temperature):
        options = {"tolerance": 0.0, "recompute": False, "outputs": ("entropy",)}
        out = linear_logprob(2 * hidden, weight, targets, temperature=temperature, **options)
        return (out.logprob + out.entropy).sum() * torch.tensor(0.5, dtype=torch.float64)

    arguments = (call.hidden, call.weight, call.targets, temperature)
    expected = torch.autograd.grad(loss(*arguments), call.parameters)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")

    operators = torch.ops.grpo_fast.head_forward, torch.ops.grpo_fast.head_backward
    assert all(torch.Tag.cudagraph_unsafe in operator.default.tags for operator in operators)
    for a, b in zip(torch.autograd.grad(compiled(*arguments), call.parameters), expected, strict=True):
        assert torch.equal(a, b)


def test_the_policy_loss_equals_the_references_and_compiles_to_one_graph(hopper, make_call, rng, monkeypatch):
    call = hopper(make_call((24,), spread=1.0))
    advantages, old_logprobs = hopper(torch.randn(2, 24, generator=rng)).sub(1).unbind()
    options = {"totals": StepTotals(24, 6), "num_sequences": 6, "tolerance": 0.0}
    options |= {"sequence_ids": hopper(torch.arange(24) // 4), "config": GRPOLossConfig(entropy_coef=0.01)}

    def loss(hidden, weight):
        given = options | {"old_logprobs": old_logprobs}
        return linear_grpo_loss(hidden, weight, call.targets, advantages, **given).loss

    def run(function) -> tuple[torch.Tensor, ...]:
        found = function(call.hidden, call.weight)
        return found, *torch.autograd.grad(found, call.parameters)

    eager, compiled = run(loss), run(torch.compile(loss, fullgraph=True, backend="aot_eager"))
    monkeypatch.setattr(operator, "device_facts", lambda kind, index: Device("cpu"))

    for a, b, c in zip(eager, compiled, run(loss), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-6)


def test_the_certificate_of_a_default_backward_has_its_error(hopper, make_call, oracle):
    call = hopper(make_call((20,), 1200, 40, spread=8.0))
    exact, _ = oracle.exact_gradients(call, {"logprob": torch.ones(20, device=call.hidden.device)})

    out = linear_logprob(call.hidden, call.weight, call.targets)
    assert out.certificate.density.isnan()
    out.logprob.sum().backward()

    assert 0 < out.certificate.density < 1
    assert 0 < out.certificate.weight_error <= plan.DEFAULT_TOLERANCE
    assert oracle.relative(call.hidden.grad, exact) < 5e-3


@pytest.fixture
def crowded(hopper, make_call, sparse_sizes):
    """Make a call whose last 8 of 16 rows keep all of 8 tiles, for lists of limited room."""

    def make(**limits):
        sparse_sizes(pair_rows=32, row_entries=64, least_pairs=1, **limits)
        call = make_call((16,), 1000, 16, spread=30.0)
        with torch.no_grad():
            call.hidden[8:] *= 0.01
        return hopper(call)

    return make


@pytest.mark.parametrize(
    ("limits", "times", "exact"),
    [
        ({"usual_density": 0.95}, 1, False),
        ({"usual_density": 0.1, "most_density": 0.95}, 2, False),
        ({"usual_density": 0.1, "most_density": 0.3}, 1, True),
    ],
    ids=["all fits", "room is made", "too many"],
)
@pytest.mark.drawn(2)
def test_more_pairs_than_room_are_computed_again_or_exactly(
    crowded, oracle, monkeypatch, limits, times, exact
):
    from grpo_fast.head import accelerated

    call, sparsely, room = crowded(**limits), accelerated.sparse_backward, []

    def noted(*given, capacity, **how):
        room.append(capacity)
        return sparsely(*given, capacity=capacity, **how)

    monkeypatch.setattr(accelerated, "sparse_backward", noted)
    ones = {"logprob": torch.ones(16, device=call.hidden.device)}
    expected = oracle.exact_gradients(call, ones)

    out = linear_logprob(call.hidden, call.weight, call.targets)
    found = oracle.gradients(call, {"logprob": out.logprob}, ones)

    assert len(room) == times
    if exact:
        assert out.certificate.values.tolist() == [1, 0, 0, 1]
    else:
        assert 0.3 < out.certificate.density < 1
    for got, wanted in zip(found, expected, strict=True):  # 4e-3 is usual, and a pair lost costs 9e-2
        assert oracle.relative(got, wanted) < (2e-5 if exact else 3e-2)


def test_a_captured_backward_reads_nothing_and_is_exact(crowded, oracle, monkeypatch):
    from grpo_fast.head import accelerated

    call = crowded(usual_density=0.1)
    ones = {"logprob": torch.ones(16, device=call.hidden.device)}
    exact = oracle.exact_gradients(call, ones)
    with torch.no_grad():
        call.hidden[call.targets == -100] = torch.nan
    out = linear_logprob(call.hidden, call.weight, call.targets)
    monkeypatch.setattr(accelerated, "_capturing", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: pytest.fail("a number was read"))

    found = oracle.gradients(call, {"logprob": out.logprob}, ones)
    monkeypatch.undo()

    assert out.certificate.values.tolist() == [1, 0, 0, 1]
    for got, expected in zip(found, exact, strict=True):
        assert oracle.relative(got, expected) < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_a_captured_step_replays_on_new_numbers(hopper, make_call, oracle, tolerance):
    call = hopper(make_call((64,), 600, 64, dtype=torch.bfloat16))

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
