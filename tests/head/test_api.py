"""The public functions against full logits, and against what other libraries got wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from grpo_fast import GRPOLossConfig, LossInputs, linear_cross_entropy, linear_grpo_loss, linear_logprob
from grpo_fast.head.checks import OUTPUTS
from grpo_fast.objective import policy_loss


def test_strongly_negative_logits_give_no_positive_logprob_and_no_nan(make_call, oracle):
    call = make_call()
    call = oracle.Call(call.hidden, call.weight, call.targets, bias=torch.full((300,), -1e4))

    logprob = call.outputs()["logprob"]

    assert (logprob <= 0).all()
    without_bias = oracle.Call(call.hidden, call.weight, call.targets)
    torch.testing.assert_close(logprob, without_bias.outputs()["logprob"], rtol=0, atol=5e-3)


def test_a_sure_target_keeps_the_digits_of_its_small_gradient(oracle):
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[16.0], [0.0]])
    call = oracle.Call(hidden, weight, torch.tensor([0]))

    (gradient,) = torch.autograd.grad(call.outputs()["logprob"].sum(), hidden)

    rest = torch.tensor(-16.0, dtype=torch.float64).exp()
    expected = 16 * rest / (1 + rest)
    torch.testing.assert_close(gradient.double(), expected.reshape(1, 1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0), ()])
def test_no_token_and_one_token_keep_their_shapes(make_call, shape):
    call = make_call((max(1, len(shape)),))
    hidden = call.hidden.detach()[0].expand(*shape, 24).clone().requires_grad_()
    targets = torch.zeros(shape, dtype=torch.int64)

    out = linear_logprob(hidden, call.weight, targets, outputs=OUTPUTS, topk=2)
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

    got = call.outputs()["logprob"]

    torch.testing.assert_close(
        got.double(), oracle.statistics(call.to(torch.float64))["logprob"], rtol=0, atol=3e-5
    )


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


def test_a_frozen_weights_gradient_is_added_too_and_the_biass_goes_through_autograd(make_call):
    call = make_call((20,), bias=True)
    expected = torch.autograd.grad(call.outputs()["logprob"].sum(), call.parameters)
    call.weight.requires_grad_(False)
    weight_grad = torch.zeros_like(call.weight)

    call.outputs(weight_grad=weight_grad)["logprob"].sum().backward()

    for got, wanted in zip((call.hidden.grad, weight_grad, call.bias.grad), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_two_forwards_may_share_a_weight_grad_before_their_backwards(make_call):
    call = make_call((20,))
    (expected,) = torch.autograd.grad(call.outputs()["logprob"].sum(), call.weight)
    weight_grad = torch.zeros_like(call.weight)

    first, second = (call.outputs(weight_grad=weight_grad)["logprob"].sum() for _ in range(2))
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
