"""The public functions against full logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from grpo_fast import GRPOLossConfig, LossInputs, linear_cross_entropy, linear_grpo_loss, linear_logprob
from grpo_fast.objective import policy_loss


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0), ()])
def test_no_token_and_one_token_keep_their_shapes(make_call, shape):
    call = make_call((max(1, len(shape)),))
    hidden = call.hidden.detach()[0].expand(*shape, 24).clone().requires_grad_()
    targets = torch.zeros(shape, dtype=torch.int64)

    out = linear_logprob(hidden, call.weight, targets, outputs=("entropy", "argmax_is_target"))
    out.logprob.sum().backward()

    assert out.logprob.shape == out.entropy.shape == out.argmax_is_target.shape == shape
    assert out.logsumexp is None and out.mean_logit is None
    assert hidden.grad.shape == hidden.shape


def test_autocast_or_the_wider_dtype_decides_and_logits_stay_float32(make_call):
    call = make_call()
    low = call.hidden.detach().bfloat16().requires_grad_()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = linear_logprob(call.hidden, call.weight, call.targets)
    mixed = linear_logprob(low, call.weight, call.targets)
    (cast.logprob + mixed.logprob).sum().backward()

    rounded = linear_logprob(call.hidden.bfloat16(), call.weight.bfloat16(), call.targets)
    assert torch.equal(cast.logprob, rounded.logprob)
    assert cast.logprob.dtype == call.hidden.grad.dtype == torch.float32
    torch.testing.assert_close(mixed.logprob, linear_logprob(low.float(), call.weight, call.targets).logprob)
    assert low.grad.dtype == torch.bfloat16


def test_without_kernels_the_certificate_is_exact(make_call):
    call = make_call((12,), 600, 16)

    out = linear_logprob(call.hidden, call.weight, call.targets, tolerance=1.0)
    out.logprob.sum().backward()

    assert repr(out.certificate) == "Certificate(density=1, hidden_error=0, weight_error=0, largest_scale=1)"


@pytest.mark.parametrize(
    ("reduction", "label_smoothing", "z_loss"),
    [("mean", 0.0, 0.0), ("sum", 0.1, 0.0), ("none", 0.1, 0.0), ("sum", 0.0, 0.01)],
)
def test_cross_entropy_is_torch_s_of_the_logits_and_the_z_loss(
    make_call, oracle, reduction, label_smoothing, z_loss
):
    call = make_call((5, 4), dtype=torch.float64)
    logits = call.hidden @ call.weight.t()
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    expected = F.cross_entropy(logits.reshape(-1, 300), call.targets.reshape(-1), **options)
    if z_loss:
        expected = expected + z_loss * oracle.statistics(call)["logsumexp"].square().sum()

    loss = linear_cross_entropy(call.hidden, call.weight, call.targets, z_loss=z_loss, **options)

    expected = expected.reshape(loss.shape)
    torch.testing.assert_close(loss, expected)
    weights = torch.randn(loss.shape, dtype=torch.float64)
    found, wanted = (torch.autograd.grad((l * weights).sum(), call.parameters) for l in (loss, expected))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_losses_of_no_token_are_zero_with_zero_gradient(make_call):
    call = make_call((4,))
    ignored = torch.full_like(call.targets, -100)

    mean = linear_cross_entropy(call.hidden, call.weight, ignored)
    policy = linear_grpo_loss(
        call.hidden[:0], call.weight, ignored[:0], torch.zeros(0), sequence_ids=ignored[:0]
    )

    assert mean == policy.loss == 0 and policy.logprobs.shape == (0,)
    assert not torch.autograd.grad(mean + policy.loss, call.weight)[0].any()


@pytest.fixture
def batch(rng) -> dict[str, torch.Tensor]:
    return {
        "advantages": torch.randn(24, generator=rng),
        "sequence_ids": torch.arange(24) // 4,
        "old_logprobs": torch.randn(24, generator=rng) - 3,
        "ref_logprobs": torch.randn(24, generator=rng) - 3,
        "loss_mask": torch.rand(24, generator=rng) < 0.8,
    }


@pytest.mark.parametrize(
    ("options", "entropy_coef"),
    [
        ({"loss_type": "grpo", "beta": 0.1}, None),
        ({"loss_type": "dapo", "entropy_coef": 0.5}, None),
        ({"loss_type": "dapo"}, 0.5),  # in place of the configuration's
    ],
    ids=str,
)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_the_policy_loss_is_the_objective_s_of_full_logits(
    make_call, oracle, batch, options, entropy_coef, mask_dtype
):
    call, config = make_call((24,), spread=1.0), GRPOLossConfig(**options)
    mask = batch["loss_mask"] & (call.targets != -100)
    exact = oracle.statistics(call)
    inputs = LossInputs(
        logprobs=exact["logprob"], entropy=exact["entropy"], num_sequences=6, **batch | {"loss_mask": mask}
    )
    expected = policy_loss(inputs, config, entropy_coef).loss
    given = batch | {"loss_mask": batch["loss_mask"].to(mask_dtype)}

    options = {"config": config, "entropy": config.beta > 0, "entropy_coef": entropy_coef}
    out = linear_grpo_loss(call.hidden, call.weight, call.targets, **given, **options)

    torch.testing.assert_close(out.loss, expected, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(out.loss, call.parameters)
    for a, b in zip(found, torch.autograd.grad(expected, call.parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out.logprobs, torch.where(mask, exact["logprob"], 0))
    torch.testing.assert_close(out.entropy, torch.where(mask, exact["entropy"], 0))
    assert not out.logprobs.requires_grad and not out.entropy.requires_grad


def test_columns_may_come_in_a_mapping_and_others_reach_a_custom_loss(
    make_call, batch, monkeypatch, tmp_path
):
    call = make_call((24,), spread=1.0)
    operands, config = (call.hidden, call.weight, call.targets), GRPOLossConfig("grpo", beta=0.1)
    old = batch["old_logprobs"].clone().requires_grad_()
    columns = batch | {"mine": torch.ones(24), "old_logprobs": old}
    needed = {name: columns[name] for name in ("advantages", "sequence_ids")}
    (tmp_path / "loss_of_columns.py").write_text(
        "from grpo_fast.objective import LossOutputs\n"
        "def loss(inputs):\n"
        "    metrics = {'mine': inputs.columns['mine'].sum(), 'others': len(inputs.columns)}\n"
        "    return LossOutputs(inputs.logprobs.sum() + inputs.old_logprobs.sum(), metrics)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    custom = linear_grpo_loss(
        *operands, **needed, columns=columns, config=GRPOLossConfig("loss_of_columns:loss")
    )

    assert torch.autograd.grad(custom.loss, old)[0].eq(1).all()  # a custom loss may differentiate it
    columns["old_logprobs"] = batch["old_logprobs"]
    found = linear_grpo_loss(*operands, **needed, columns=columns, config=config)
    assert torch.equal(found.loss, linear_grpo_loss(*operands, **batch, config=config).loss)
    assert custom.metrics == {"mine": 24, "others": 1}


def test_sequence_ids_may_have_gaps(make_call, batch):
    call, config = make_call((24,), spread=1.0), GRPOLossConfig("grpo")
    operands = (call.hidden, call.weight, call.targets)
    expected = linear_grpo_loss(*operands, **batch, config=config)

    batch["sequence_ids"] = 3 + batch["sequence_ids"] ** 2
    found = linear_grpo_loss(*operands, **batch, config=config)

    assert torch.equal(found.loss, expected.loss)
