"""The policy loss kernel against `objective.policy_loss` in float64, for each of its losses."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from grpo_fast import GRPOLossConfig, LossInputs
from grpo_fast.head.fused_loss import fused_policy_loss, fuses
from grpo_fast.objective import StepTotals, policy_loss
from grpo_fast.objective.catalog import CATALOG

pytest.importorskip("triton")

UNFUSED = {"gmpo", "vespo", "clip_cov", "kl_cov"}
FUSED = tuple(name for name in CATALOG if name not in UNFUSED)
LENGTHS = (9, 1, 520, 4, 0, 17)  # one is longer than a program takes at a time


@pytest.fixture
def batch(rng, device) -> LossInputs:
    """Make a batch of multiples of 1/64, so that no ratio lies on a bound; masked tokens are NaN."""
    count = sum(LENGTHS)

    def numbers(low: float, high: float) -> torch.Tensor:
        values = torch.randint(int(64 * low), int(64 * high) + 1, (count,), generator=rng) / 64
        return values.masked_fill(~mask, torch.nan).to(device)

    mask = torch.rand(count, generator=rng) < 0.8
    mask[9] = False  # the whole second sequence
    old = numbers(-4, -0.5)
    return LossInputs(
        logprobs=(old + numbers(-0.45, 0.45)).requires_grad_(),
        advantages=numbers(-2, 2),
        sequence_ids=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).to(device),
        loss_mask=mask.to(device),
        num_sequences=len(LENGTHS),
        old_logprobs=old,
        ref_logprobs=old + numbers(-1, 1),
        sampler_logprobs=old + numbers(-0.5, 0.5),
        entropy=numbers(0, 3).requires_grad_(),
    )


def exact(inputs: LossInputs) -> LossInputs:
    """Cast to new leaves in float64."""

    def widen(value):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    return LossInputs(**{field.name: widen(getattr(inputs, field.name)) for field in fields(inputs)})


def assert_same(inputs: LossInputs, config: GRPOLossConfig) -> None:
    """Compare loss, metrics and gradients, to the error of float32 sums."""
    wide = exact(inputs)
    assert fuses(inputs, config)

    got, expected = fused_policy_loss(inputs, config), policy_loss(wide, config)

    assert got.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        torch.testing.assert_close(got.metrics[name].double(), value, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(got.loss.double(), expected.loss, rtol=1e-4, atol=1e-4)
    (3 * got.loss).backward()
    (3 * expected.loss).backward()
    for name in ("logprobs", "entropy") if inputs.entropy is not None else ("logprobs",):
        found, wanted = getattr(inputs, name).grad, getattr(wide, name).grad
        assert (found is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(
                found.double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())
            )


def config_of(name: str, **changes) -> GRPOLossConfig:
    return GRPOLossConfig(loss_type=name, max_completion_length=50, **changes)


CORRECTIONS = [
    f"{level}_{how}" for level in ("token", "sequence", "geometric") for how in ("truncate", "mask")
]
CORRECT_KL = {"beta": 0.2, "use_bias_correction_kl": True}
STEP = StepTotals(5000, 24)
MEASURED = replace(STEP, measured_tokens=4000, measured_sequences=20)
CASES: list[tuple[str, dict, dict]] = [
    *((name, {} if CATALOG[name].forbids_kl else {"beta": 0.1}, {}) for name in FUSED),
    *((name, {}, {"old_logprobs": None}) for name in FUSED),
    ("grpo", {"beta": 0.2, "kl_estimator": "k1"}, {}),
    *(("grpo", CORRECT_KL | {"kl_estimator": kind}, {}) for kind in ("k1", "k2", "k3")),
    ("grpo", {"beta": 0.2, "kl_estimator": "k2", "kl_in_reward": True}, {}),
    *(("dapo", {"sampler_correction": kind, "sampler_clip_max": 1.3}, {}) for kind in CORRECTIONS),
    *(("dapo", {"sampler_correction": kind, "sampler_clip_min": 0.7}, {}) for kind in CORRECTIONS),
    ("dapo", {"delta": 1.5}, {}),
    ("dapo", {"aggregation": "constant_length"}, {"totals": STEP}),
    ("dapo", {"entropy_coef": 0.01}, {}),
    ("dapo", {"off_policy_mask_threshold": 0.123}, {}),
    ("dapo", {"importance_sampling_level": "sequence"}, {}),
    ("dapo", {"importance_sampling_level": "sequence_token"}, {}),
    ("dapo", {"epsilon_low": 1.0, "epsilon_high": 0.28}, {}),
    ("grpo", {}, {"totals": STEP}),
    ("dapo", {}, {"totals": MEASURED}),
    ("dr_grpo", {}, {"totals": STEP}),
    ("gspo", {}, {"totals": MEASURED}),
    ("cispo", {"beta": 0.2, "kl_in_reward": True}, {"ref_logprobs": None}),
    ("cispo", {"epsilon_high": 1.2}, {"sampler_logprobs": None}),
    ("dppo_tv", {"dppo_ratio_max": 1.2}, {}),
    ("cispo", {}, {"entropy": None}),
]


@pytest.mark.parametrize(("name", "options", "changes"), CASES, ids=str)
@pytest.mark.drawn(24)
def test_every_loss_and_option_is_the_objectives(batch, name, options, changes):
    assert_same(replace(batch, **changes), config_of(name, **options))


def test_k3_is_the_objectives_where_the_reference_is_far_away(batch):
    far = batch.logprobs.detach() + torch.linspace(-60, 60, len(batch.logprobs)).to(batch.logprobs)

    assert_same(replace(batch, ref_logprobs=far), config_of("grpo", beta=0.1))


def test_sequences_may_come_in_any_order_strided_or_all_masked(batch):
    shuffled = torch.tensor([3, 5, 0, 1, 4, 2], device=batch.sequence_ids.device)
    strided = {
        name: value.detach().repeat_interleave(2)[::2].requires_grad_(value.requires_grad)
        for name, value in (vars(batch) | {"sequence_ids": shuffled[batch.sequence_ids]}).items()
        if isinstance(value, torch.Tensor)
    }

    assert_same(replace(batch, **strided), config_of("grpo"))
    assert_same(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), config_of("grpo", beta=0.1))


def test_a_sequence_in_two_pieces_makes_loss_and_gradient_nan(batch):
    ids = batch.sequence_ids.clone()
    ids[:8] = torch.tensor([0, 1, 0, 1, 0, 0, 1, 1])
    inputs = replace(batch, sequence_ids=ids)

    loss = fused_policy_loss(inputs, config_of("grpo")).loss
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)

    assert loss.isnan() and gradient[(ids < 2) & batch.loss_mask].isnan().all()
    assert gradient[ids >= 2].isfinite().all()


def test_a_second_derivative_is_refused(batch):
    loss = fused_policy_loss(batch, config_of("grpo")).loss

    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, batch.logprobs, create_graph=True)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        *(({"loss_type": name}, {}) for name in sorted(UNFUSED)),
        ({"loss_type": "tests.losses:mine"}, {}),
        ({"top_entropy_quantile": 0.2}, {}),
        ({"beta": 0.1}, {"ref_logprobs": None}),
        ({"entropy_coef": 0.1}, {"entropy": None}),
        ({"sampler_correction": "token_truncate"}, {"sampler_logprobs": None}),
        ({"loss_type": "dr_grpo"}, {}),
        ({}, {"policy_weights": torch.ones(sum(LENGTHS))}),
        ({}, {"num_sequences": 0}),
    ],
)
def test_unknown_losses_and_missing_inputs_are_left_to_the_objective(batch, options, changes):
    assert fuses(batch, GRPOLossConfig())
    assert not fuses(replace(batch, logprobs=batch.logprobs.double()), GRPOLossConfig())
    assert not fuses(replace(batch, **changes), GRPOLossConfig(**options))
