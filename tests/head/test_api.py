"""The public functions against full logits, and against what other libraries got wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from grpo_fast import GRPOLossConfig, LossInputs, linear_cross_entropy, linear_grpo_loss, linear_logprob
from grpo_fast.objective import policy_loss

DIFFERENTIABLE = ("logprob", "entropy", "logsumexp", "mean_logit")
EVERY = (*DIFFERENTIABLE, "argmax_is_target", "log_sum_sq_probs")


def ours(call, outputs=("logprob",), **options) -> dict[str, torch.Tensor]:
    out = linear_logprob(call.hidden, call.weight, call.targets, outputs=outputs, **call.options, **options)
    return {name: getattr(out, name) for name in outputs}


@pytest.mark.parametrize("transformed", [False, True])
def test_every_output_matches_full_logits(make_call, oracle, transformed):
    call = make_call((3, 7), dtype=torch.float64, transformed=transformed)

    got = ours(call, EVERY)

    for name, expected in oracle.statistics(call).items():
        assert got[name].shape == (3, 7)
        torch.testing.assert_close(got[name], expected, msg=name)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_differentiable_output_has_the_exact_gradient(make_call, make_upstream, oracle, name):
    call = make_call(dtype=torch.float64, transformed=True)
    upstream = make_upstream(call.targets.shape, (name,))

    found = oracle.gradients(call, ours(call, EVERY), upstream)

    expected = oracle.gradients(call, oracle.statistics(call), upstream)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("transformed", [False, True])
def test_a_frozen_head_gives_the_same_hidden_gradient_and_no_weight_gradient(
    make_call, make_upstream, oracle, transformed
):
    call = make_call((29,), dtype=torch.float64, transformed=transformed)
    upstream = make_upstream(call.targets.shape)
    expected, *_ = oracle.gradients(call, oracle.statistics(call), upstream)
    for parameter in (call.weight, call.bias):
        if parameter is not None:
            parameter.requires_grad_(False)

    (ours(call)["logprob"] * upstream["logprob"]).sum().backward()

    torch.testing.assert_close(call.hidden.grad, expected)
    assert call.weight.grad is None


def test_a_frozen_body_gives_the_weight_gradient_alone(make_call, make_upstream, oracle):
    call = make_call(dtype=torch.float64)
    upstream = make_upstream(call.targets.shape)
    _, expected = oracle.gradients(call, oracle.statistics(call), upstream)
    call.hidden.requires_grad_(False)

    (ours(call)["logprob"] * upstream["logprob"]).sum().backward()

    torch.testing.assert_close(call.weight.grad, expected)
    assert call.hidden.grad is None


def test_strongly_negative_logits_give_no_positive_logprob_and_no_nan(make_call, oracle):
    call = make_call()
    call = oracle.Call(call.hidden, call.weight, call.targets, bias=torch.full((300,), -1e4))

    logprob = ours(call)["logprob"]

    assert (logprob <= 0).all()
    without_bias = oracle.Call(call.hidden, call.weight, call.targets)
    torch.testing.assert_close(logprob, ours(without_bias)["logprob"], rtol=0, atol=5e-3)


def test_a_sure_target_keeps_the_digits_of_its_small_gradient(oracle):
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[16.0], [0.0]])
    call = oracle.Call(hidden, weight, torch.tensor([0]))

    (gradient,) = torch.autograd.grad(ours(call)["logprob"].sum(), hidden)

    rest = torch.tensor(-16.0, dtype=torch.float64).exp()
    expected = 16 * rest / (1 + rest)
    torch.testing.assert_close(gradient.double(), expected.reshape(1, 1), rtol=1e-6, atol=0)


def test_the_upstream_gradient_scales_the_gradient_once(make_call):
    call = make_call()

    once = torch.autograd.grad(ours(call)["logprob"].sum(), call.parameters)
    thrice = torch.autograd.grad(3 * ours(call)["logprob"].sum(), call.parameters)

    for a, b in zip(once, thrice, strict=True):
        torch.testing.assert_close(3 * a, b)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_second_backward_through_the_kept_graph_gives_the_same_gradient(make_call, frozen):
    call = make_call()
    call.weight.requires_grad_(not frozen)
    loss = ours(call)["logprob"].sum()

    first = torch.autograd.grad(loss, call.hidden, retain_graph=True)[0]
    second = torch.autograd.grad(loss, call.hidden)[0]

    assert torch.equal(first, second)


def test_ignored_rows_are_zero_whatever_they_hold(make_call):
    call = make_call()
    ignored = call.targets == -100
    with torch.no_grad():
        call.hidden[ignored] = torch.nan

    got = ours(call, EVERY)
    gradient = torch.autograd.grad(sum(got[name].sum() for name in DIFFERENTIABLE), call.parameters)

    assert all((value[ignored] == 0).all() for value in got.values())
    assert (gradient[0][ignored] == 0).all()
    assert not any(g.isnan().any() for g in gradient)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0), ()])
def test_no_token_and_one_token_keep_their_shapes(make_call, shape):
    call = make_call((max(1, len(shape)),))
    hidden = call.hidden.detach()[0].expand(*shape, 24).clone().requires_grad_()
    targets = torch.zeros(shape, dtype=torch.int64)

    out = linear_logprob(hidden, call.weight, targets, outputs=EVERY, topk=2)
    out.logprob.sum().backward()

    assert out.logprob.shape == out.entropy.shape == shape
    assert out.topk_ids.shape == (*shape, 2)
    assert hidden.grad.shape == hidden.shape


def test_top_entries_are_those_of_the_full_softmax(make_call):
    call = make_call((4, 5), dtype=torch.float64)
    expected = (call.hidden @ call.weight.t()).log_softmax(-1).topk(3)

    out = linear_logprob(call.hidden, call.weight, call.targets, topk=3)

    worked = call.targets != -100
    assert torch.equal(out.topk_ids[worked], expected.indices[worked])
    torch.testing.assert_close(out.topk_logprobs[worked], expected.values[worked])
    assert (out.topk_ids[~worked] == -1).all()


def test_autocast_decides_the_dtype_and_logits_stay_float32(make_call):
    call = make_call()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linear_logprob(call.hidden, call.weight, call.targets)
    out.logprob.sum().backward()

    rounded = linear_logprob(call.hidden.bfloat16(), call.weight.bfloat16(), call.targets)
    assert torch.equal(out.logprob, rounded.logprob)
    assert out.logprob.dtype == call.hidden.grad.dtype == torch.float32


def test_mixed_dtypes_compute_in_the_wider_one(make_call):
    call = make_call()
    low = call.hidden.detach().bfloat16().requires_grad_()

    out = linear_logprob(low, call.weight, call.targets)
    out.logprob.sum().backward()

    torch.testing.assert_close(out.logprob, linear_logprob(low.float(), call.weight, call.targets).logprob)
    assert low.grad.dtype == torch.bfloat16


def test_bf16_logits_are_not_rounded_to_bf16(make_call, oracle):
    call = make_call((64,), 1000, 64, dtype=torch.bfloat16, spread=8.0)

    got = ours(call)["logprob"]

    torch.testing.assert_close(
        got.double(), oracle.statistics(call.to(torch.float64))["logprob"], rtol=0, atol=3e-5
    )


def test_a_compiled_caller_sees_one_operator_and_the_same_numbers(make_call):
    call = make_call()
    temperature = torch.tensor(0.7, dtype=torch.float64)

    def loss(hidden, weight, targets, temperature):
        out = linear_logprob(2 * hidden, weight, targets, temperature=temperature, outputs=("entropy",))
        return (out.logprob + out.entropy).sum() * torch.tensor(0.5, dtype=torch.float64)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    arguments = (call.hidden, call.weight, call.targets, temperature)
    expected = torch.autograd.grad(loss(*arguments), call.parameters)
    found = torch.autograd.grad(compiled(*arguments), call.parameters)

    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_compiled_caller_may_change_the_temperature_from_call_to_call(make_call):
    call = make_call()

    def total(hidden, temperature):
        return linear_logprob(hidden, call.weight, call.targets, temperature=temperature).logprob.sum()

    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    for temperature in (0.7, 0.9, 1.3):
        torch.testing.assert_close(compiled(call.hidden, temperature), total(call.hidden, temperature))


def test_the_certificate_is_pending_until_the_backward_has_run(make_call):
    call = make_call()

    out = linear_logprob(call.hidden, call.weight, call.targets)
    before = out.certificate.density.clone()
    out.logprob.sum().backward()

    assert before.isnan()
    assert out.certificate.error_bound == 0
    assert repr(out.certificate) == "Certificate(density=1, left_out_mean=0, left_out_max=0, error_bound=0)"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_is_torch_s_of_the_logits(make_call, reduction, label_smoothing):
    call = make_call((5, 4), dtype=torch.float64)
    logits = call.hidden @ call.weight.t()
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    expected = F.cross_entropy(logits.reshape(-1, 300), call.targets.reshape(-1), **options)

    loss = linear_cross_entropy(call.hidden, call.weight, call.targets, **options)

    torch.testing.assert_close(loss, expected.reshape(loss.shape))
    weights = torch.randn(loss.shape, dtype=torch.float64)
    found = torch.autograd.grad((loss * weights).sum(), call.parameters)
    wanted = torch.autograd.grad((expected.reshape(loss.shape) * weights).sum(), call.parameters)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_z_loss_adds_the_squared_log_sum_exp(make_call, oracle):
    call = make_call(dtype=torch.float64)
    found = oracle.statistics(call)
    expected = (0.01 * found["logsumexp"].square() - found["logprob"]).sum()

    loss = linear_cross_entropy(call.hidden, call.weight, call.targets, reduction="sum", z_loss=0.01)

    torch.testing.assert_close(loss, expected)
    for a, b in zip(*(torch.autograd.grad(l, call.parameters) for l in (loss, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_mean_over_no_token_is_zero_with_zero_gradient(make_call):
    call = make_call()
    nothing = torch.full_like(call.targets, -100)

    loss = linear_cross_entropy(call.hidden, call.weight, nothing)
    loss.backward()

    assert loss == 0
    assert not call.hidden.grad.any()
    assert not call.weight.grad.any()


def packed(call, rng) -> dict[str, torch.Tensor]:
    count = call.targets.numel()
    return {
        "advantages": torch.randn(count, generator=rng),
        "sequence_ids": torch.arange(count) // 4,
        "old_logprobs": torch.randn(count, generator=rng) - 3,
        "ref_logprobs": torch.randn(count, generator=rng) - 3,
        "loss_mask": torch.rand(count, generator=rng) < 0.8,
    }


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_the_policy_loss_is_the_objective_s_of_full_logits(make_call, oracle, rng, loss_type):
    call = make_call((24,), spread=1.0)
    batch = packed(call, rng)
    config = GRPOLossConfig(loss_type=loss_type, beta=0.1)
    mask = batch["loss_mask"] & (call.targets != -100)
    logprobs = oracle.statistics(call)["logprob"]
    inputs = LossInputs(logprobs=logprobs, num_sequences=6, **batch | {"loss_mask": mask})
    expected = policy_loss(inputs, config).loss

    out = linear_grpo_loss(call.hidden, call.weight, call.targets, **batch, config=config, entropy=True)

    torch.testing.assert_close(out.loss, expected, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(out.loss, call.parameters)
    for a, b in zip(found, torch.autograd.grad(expected, call.parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out.logprobs, torch.where(mask, logprobs, 0))
    assert not out.logprobs.requires_grad
    assert out.entropy.shape == (24,)


def test_an_entropy_bonus_reaches_the_gradient(make_call, rng):
    call = make_call((24,), spread=1.0)
    batch = packed(call, rng)

    def gradient(coefficient: float) -> torch.Tensor:
        config = GRPOLossConfig(entropy_coef=coefficient)
        out = linear_grpo_loss(call.hidden, call.weight, call.targets, **batch, config=config)
        return torch.autograd.grad(out.loss, call.hidden)[0]

    assert not torch.allclose(gradient(0.0), gradient(0.5))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int64, torch.float32])
def test_a_mask_may_be_zeros_and_ones_of_any_dtype(make_call, rng, kind):
    call = make_call((24,), spread=1.0)
    batch = packed(call, rng)

    losses = [
        linear_grpo_loss(call.hidden, call.weight, call.targets, **batch | {"loss_mask": mask}).loss
        for mask in (batch["loss_mask"], batch["loss_mask"].to(kind))
    ]

    assert losses[0] == losses[1]


def test_masked_tokens_cost_nothing_and_may_hold_anything(make_call, rng):
    call = make_call((24,), spread=1.0)
    batch = packed(call, rng)
    spoiled = call.hidden.detach().clone()
    spoiled[~batch["loss_mask"]] = torch.nan
    spoiled.requires_grad_()

    out = linear_grpo_loss(spoiled, call.weight, call.targets, **batch)
    out.loss.backward()

    expected = linear_grpo_loss(call.hidden, call.weight, call.targets, **batch)
    torch.testing.assert_close(out.loss, expected.loss)
    assert (spoiled.grad[~batch["loss_mask"]] == 0).all()


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "loss_mask", "sequence_ids"])
def test_a_per_token_input_of_another_length_is_named(make_call, rng, name):
    call = make_call((24,))
    batch = packed(call, rng)
    batch[name] = batch[name][:-1]

    with pytest.raises(ValueError, match=name):
        linear_grpo_loss(call.hidden, call.weight, call.targets, **batch)


@pytest.mark.parametrize("tolerance", [None, 1.0])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_weights_gradient_is_added_where_the_caller_says(make_call, rng, kind, tolerance):
    call = make_call((20,), dtype=torch.bfloat16)
    before = torch.randn(call.weight.shape, generator=rng).to(kind)
    (expected,) = torch.autograd.grad(ours(call, tolerance=tolerance)["logprob"].sum(), call.weight)
    weight_grad = before.clone()

    for _ in range(2):
        ours(call, tolerance=tolerance, weight_grad=weight_grad)["logprob"].sum().backward()

    added = weight_grad.double() - before.double()
    # Each addition rounds to the buffer's dtype, autograd's own gradient to the weight's.
    limit = 4 * torch.finfo(kind).eps * weight_grad.abs().max() + 2**-6 * expected.abs().max()
    assert call.weight.grad is None
    assert (added - 2 * expected.double()).abs().max() <= limit


def test_a_frozen_weights_gradient_is_added_too_and_the_biass_goes_through_autograd(make_call):
    call = make_call((20,), bias=True)
    expected = torch.autograd.grad(ours(call)["logprob"].sum(), call.parameters)
    call.weight.requires_grad_(False)
    weight_grad = torch.zeros_like(call.weight)

    ours(call, weight_grad=weight_grad)["logprob"].sum().backward()

    for got, wanted in zip((call.hidden.grad, weight_grad, call.bias.grad), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_two_forwards_may_share_a_weight_grad_before_their_backwards(make_call):
    call = make_call((20,))
    (expected,) = torch.autograd.grad(ours(call)["logprob"].sum(), call.weight)
    weight_grad = torch.zeros_like(call.weight)

    first, second = (ours(call, weight_grad=weight_grad)["logprob"].sum() for _ in range(2))
    (first + second).backward()

    torch.testing.assert_close(weight_grad, 2 * expected)


def test_cross_entropy_and_the_policy_loss_add_into_weight_grad(make_call):
    call = make_call((20,))
    options = {"sequence_ids": torch.zeros(20, dtype=torch.int64), "num_sequences": 1}

    def losses(**where):
        yield linear_cross_entropy(call.hidden, call.weight, call.targets, **where)
        yield linear_grpo_loss(
            call.hidden, call.weight, call.targets, torch.ones(20), **options, **where
        ).loss

    for plain, adding in zip(
        losses(), losses(weight_grad=(found := torch.zeros_like(call.weight))), strict=True
    ):
        found.zero_()
        (expected,) = torch.autograd.grad(plain, call.weight)
        adding.backward()
        torch.testing.assert_close(found, expected)


def test_a_weight_grad_that_cannot_take_the_gradient_is_refused_by_name(make_call):
    call = make_call()

    with pytest.raises(TypeError, match="weight_grad must be a float tensor"):
        ours(call, weight_grad=torch.zeros(call.weight.shape, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"weight_grad is \(2, 24\)"):
        ours(call, weight_grad=torch.zeros(2, 24))
    with pytest.raises(ValueError, match="unit stride"):
        ours(call, weight_grad=torch.zeros(call.weight.shape[::-1]).t())
    call.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match="gradient hooks"):
        ours(call, weight_grad=torch.zeros_like(call.weight))
