"""What holds for every loss: terms add up, micro-batches add up, order and padding do not matter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from grpo_fast.config.lookup import given
from grpo_fast.objective import GRPOLossConfig, LossOutputs, StepTotals, policy_loss, resolve_loss
from grpo_fast.objective.catalog import CATALOG, LOSS_TYPES, Aggregation
from grpo_fast.objective.metrics import sum_metrics
from grpo_fast.objective.terms import kl_estimate

PER_TOKEN = ("logprobs", "advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs", "entropy")


BONUS, HIGH_ENTROPY = {"entropy_coef": 0.01}, {"top_entropy_quantile": 0.6}


def full_config(loss_type, **changes):
    return GRPOLossConfig(
        loss_type,
        beta=0.0 if CATALOG[loss_type].forbids_kl else 0.1,
        sampler_correction="token_truncate",
        max_completion_length=12,
        off_policy_mask_threshold=0.4,
        **changes,
    )


def gradients(batch, *losses):
    return torch.autograd.grad(sum(losses), (batch.logprobs, batch.entropy), allow_unused=True)


def combine(shares):
    pick = {"_max": max, "_min": min}
    return {name: float(pick.get(name[-4:], sum)([share[name] for share in shares])) for name in shares[0]}


CHOOSE = ("clip_cov", "kl_cov")  # tokens within the micro-batch


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name not in CHOOSE])
def test_losses_gradients_and_metrics_of_micro_batches_in_any_order_add_up(loss_type, make_batch, rng):
    batch, config = make_batch(spread=0.6, empty=True), full_config(loss_type, **BONUS)
    rows = torch.randperm(len(batch.lengths), generator=rng).tolist()

    expected = policy_loss(batch.inputs(), config)
    parts = (rows[:1], rows[1:3], rows[3:])
    found = [policy_loss(batch.inputs(part, batch.totals), config) for part in parts]

    torch.testing.assert_close(sum(part.loss for part in found), expected.loss)
    of_parts, of_whole = gradients(batch, *(part.loss for part in found)), gradients(batch, expected.loss)
    torch.testing.assert_close(of_parts, of_whole)
    assert combine([part.metrics for part in found]) == pytest.approx(combine([expected.metrics]))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tokens_that_do_not_count_are_never_read(loss_type, make_batch):
    batch, config = make_batch(spread=0.6), full_config(loss_type, **BONUS, **HIGH_ENTROPY)
    clean = batch.inputs()
    spoiled = replace(
        clean,
        **{name: getattr(clean, name).detach().masked_fill(~clean.loss_mask, math.nan) for name in PER_TOKEN},
    )
    spoiled.logprobs.requires_grad_()

    torch.manual_seed(0)
    expected = policy_loss(clean, config)
    torch.manual_seed(0)
    outputs = policy_loss(spoiled, config)
    outputs.loss.backward()

    torch.testing.assert_close(outputs.loss, expected.loss)
    assert (spoiled.logprobs.grad[~clean.loss_mask] == 0).all()
    assert all(torch.isfinite(value) for value in outputs.metrics.values())


@pytest.mark.parametrize("aggregation", [None, *get_args(Aggregation)])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_without_old_logprobs_the_gradient_is_the_policy_gradient(loss_type, aggregation, make_batch):
    batch = make_batch()
    config = GRPOLossConfig(loss_type, aggregation=aggregation, max_completion_length=12)

    outputs = policy_loss(replace(batch.inputs(), old_logprobs=None, ref_logprobs=None), config)

    gradient = torch.autograd.grad(outputs.loss, batch.logprobs)[0]
    assert outputs.metrics["policy/ratio_max"] == outputs.metrics["policy/ratio_min"] == 1.0
    assert outputs.metrics["policy/ratio_mean"].item() == pytest.approx(1.0)
    if loss_type != "clip_cov" and not (loss_type == "rloo" and aggregation):
        counts, size = batch.mask.sum(1, keepdim=True).double(), len(batch.lengths)
        # rloo: the ratio is of the whole completion, so that its gradient is a sum over tokens.
        own = "sequence_sum" if loss_type == "rloo" else CATALOG[loss_type].aggregation
        weights = {
            "sequence_mean": 1 / (size * counts),
            "token_mean": 1 / batch.mask.sum(),
            "sequence_sum": 1 / size,
            "constant_length": 1 / (size * 12),
        }[aggregation or own]
        torch.testing.assert_close(gradient, -weights * batch.advantages[:, None] * batch.mask)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("corrected", [False, True], ids=["", "bias-corrected"])
def test_the_kl_term_is_beta_times_the_mean_or_in_the_reward_instead(estimator, corrected, make_batch):
    batch = make_batch(spread=0.6)
    config = GRPOLossConfig(kl_estimator=estimator)
    without = policy_loss(batch.inputs(), config).loss

    outputs = policy_loss(batch.inputs(), replace(config, beta=0.3, use_bias_correction_kl=corrected))

    kl = kl_estimate(batch.logprobs, batch.ref, estimator)
    term = (kl * ((batch.logprobs - batch.old).exp() if corrected else 1))[batch.mask].mean()
    torch.testing.assert_close(outputs.loss - without, 0.3 * term)
    found, expected = (
        torch.autograd.grad(loss, batch.logprobs, retain_graph=True)
        for loss in (outputs.loss, without + 0.3 * term)
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(outputs.metrics["kl"], kl[batch.mask].mean().detach())
    in_reward = policy_loss(batch.inputs(), replace(config, beta=0.3, kl_in_reward=True))
    torch.testing.assert_close(in_reward.loss, without)
    torch.testing.assert_close(in_reward.metrics["kl"], outputs.metrics["kl"])


def test_an_exact_kl_takes_the_place_of_its_estimate(make_batch):
    inputs = make_batch().inputs()
    kl = inputs.advantages.square().requires_grad_()
    config = GRPOLossConfig(kl_estimator="exact")

    outputs = policy_loss(replace(inputs, exact_kl=kl, ref_logprobs=None), replace(config, beta=0.3))

    term = kl[inputs.loss_mask].mean()
    torch.testing.assert_close(outputs.loss - policy_loss(inputs, config).loss, 0.3 * term)
    torch.testing.assert_close(outputs.metrics["kl"], term.detach())
    found, expected = (torch.autograd.grad(loss, kl)[0] for loss in (outputs.loss, 0.3 * term))
    torch.testing.assert_close(found, expected)
    for changes in ({"kl_in_reward": True}, {"use_bias_correction_kl": True}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            replace(config, beta=0.3, **changes)


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
def test_metrics_are_means_over_the_batches_and_the_loss_over_the_step(loss_type, make_batch):
    batch, config = make_batch(spread=0.3), GRPOLossConfig(loss_type, beta=0.1)
    n, sequences = batch.totals.num_tokens, batch.totals.num_sequences
    half_left_out = StepTotals(2 * n, 2 * sequences, measured_tokens=n, measured_sequences=sequences)

    whole, half = (policy_loss(batch.inputs(totals=totals), config) for totals in (None, half_left_out))

    torch.testing.assert_close(half.loss, whole.loss / 2)
    assert combine([half.metrics]) == pytest.approx(combine([whole.metrics]))


def test_policy_weights_multiply_the_policy_term_of_each_token(make_batch):
    inputs = make_batch().inputs()
    doubled = replace(inputs, policy_weights=torch.full_like(inputs.advantages, 2.0))

    plain, weighted = (policy_loss(i, GRPOLossConfig(beta=0.1)) for i in (inputs, doubled))

    torch.testing.assert_close(weighted.loss, 2 * plain.loss - 0.1 * plain.metrics["kl"])


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"beta": 0.1}, "ref_logprobs"),
        ({"beta": 0.1, "kl_estimator": "exact"}, "exact_kl"),
        ({"entropy_coef": 0.1}, "entropy"),
        ({"use_adaptive_entropy": True}, "entropy"),
        ({"top_entropy_quantile": 0.2}, "entropy"),
        ({"sampler_correction": "token_mask"}, "sampler_logprobs"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
    ],
)
def test_an_input_that_the_config_needs_and_is_missing_is_named(changes, missing, make_batch):
    without = dict.fromkeys(("sampler_logprobs", "ref_logprobs", "entropy"))
    inputs = replace(make_batch().inputs(), **without)

    with pytest.raises(ValueError, match=missing):
        policy_loss(inputs, GRPOLossConfig(**changes))


def test_a_steps_metrics_come_to_the_host_in_one_copy(monkeypatch):
    copies, copy = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor) or copy(tensor))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("a second copy"))
    first = {"kl": torch.tensor(1.0), "ratio_max": torch.tensor(3.0), "ratio_min": torch.tensor(-torch.inf)}
    second = {"kl": torch.tensor(0.5), "ratio_max": torch.tensor(2.0), "ratio_min": 1.0, "loss": 4}

    assert sum_metrics([first, second]) == {"kl": 1.5, "ratio_max": 3, "ratio_min": -math.inf, "loss": 4}
    assert len(copies) == 1 and sum_metrics([]) == {}


def test_a_custom_loss_is_not_asked_about_a_rank_without_completions(make_batch):
    whole, none = make_batch().inputs(), torch.zeros(0, requires_grad=True)
    inputs = replace(whole, logprobs=none, num_sequences=0)
    with given({"own:mean@python": lambda inputs: LossOutputs(inputs.logprobs.mean())}):
        loss = resolve_loss("own:mean@python")
        loss(inputs).loss.backward()
        assert loss(inputs).loss == 0 and loss(whole).loss == whole.logprobs.mean()


def test_a_loss_is_found_by_its_name_and_ones_own_by_its_import_path(make_batch, monkeypatch, tmp_path):
    (tmp_path / "my_own_losses.py").write_text(
        "from grpo_fast.objective import LossOutputs\n"
        "def negative_mean(inputs):\n"
        "    return LossOutputs(-inputs.logprobs.mean(), {'groups': inputs.group_ids.max()})\n"
        "def wrong(inputs):\n"
        "    return inputs.logprobs.mean()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    inputs = make_batch().inputs()
    by_name = resolve_loss("gspo")(inputs).loss
    torch.testing.assert_close(by_name, policy_loss(inputs, GRPOLossConfig("gspo")).loss)

    outputs = policy_loss(inputs, GRPOLossConfig("my_own_losses:negative_mean", beta=0.1))

    torch.testing.assert_close(outputs.loss, -inputs.logprobs.mean())
    assert set(outputs.metrics) == {"groups"}
    with pytest.raises(TypeError, match=r"return grpo_fast\.objective\.LossOutputs"):
        resolve_loss("my_own_losses:wrong")(inputs)
    for own in (LossOutputs(inputs.logprobs.sum()), LossOutputs(inputs.logprobs.mean())):
        with given({"mine:loss@digest": lambda _, own=own: own}):  # a Python program's objects of one name
            assert resolve_loss("mine:loss@digest")(inputs) is own
    for path in ("my_own_losses:absent", "no_such_module:loss"):
        with pytest.raises(ValueError, match=path):
            resolve_loss(path)
