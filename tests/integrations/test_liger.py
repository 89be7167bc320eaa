"""Our modules against Liger 0.8's of the same name: loss, metrics and gradients on the same random batch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_fast.integrations import liger as ours
from grpo_fast.integrations.host_loss import LOSS_TYPES
from grpo_fast.integrations.liger.preference import DPO_VARIANTS

theirs = pytest.importorskip("liger_kernel.chunked_loss", reason="pip install --no-deps liger-kernel==0.8.5")
B, T, H, V = 4, 9, 16, 40


def paired_runs(name: str, settings: dict[str, Any], arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The same call of both modules: loss, metrics, and gradients of every leaf."""
    results = []
    for module in (ours, theirs):
        leaves = {
            key: value.clone().requires_grad_() if key in ("_input", "lin_weight", "bias") else value
            for key, value in arguments.items()
        }
        loss, metrics = getattr(module, name)(compiled=False, **settings)(**leaves)
        (2.5 * loss).backward()
        gradients = {
            key: leaf.grad for key, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.is_leaf
        }
        results.append({"loss": loss.detach(), "metrics": metrics, "gradients": gradients})
    return results


def assert_same(results: list[dict[str, Any]], tolerance: float = 2e-5) -> None:
    mine, liger = results
    assert len(mine["metrics"]) == len(liger["metrics"])
    for part in ("loss", "metrics", "gradients"):
        torch.testing.assert_close(mine[part], liger[part], rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.fixture
def make_completions(rng: torch.Generator):
    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=rng)

    def make(**extra: Any) -> dict[str, Any]:
        mask = (torch.rand(B, T, generator=rng) < 0.7).long()
        mask[0] = 0  # a completion masked out whole
        mask[1, 0] = 1
        arguments = {
            "_input": random(B, T, H),
            "lin_weight": random(V, H, scale=0.3),
            "bias": random(V, scale=0.3),
            "selected_token_ids": torch.randint(V, (B, T), generator=rng),
            "attention_mask": mask,
            "advantages": random(B),
            "old_per_token_logps": random(B, T, scale=0.3) - 4,
            "ref_per_token_logps": random(B, T, scale=0.3) - 4,
        }
        return {**arguments, **extra}

    return make


ONE_EACH = [
    *(("token", kind) for kind in LOSS_TYPES),
    *(("sequence", kind) for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")),
]


def grpo_settings(level: str, kind: str, **changes: Any) -> dict[str, Any]:
    basic = {"loss_type": kind, "importance_sampling_level": level, "max_completion_length": 12, "beta": 0.0}
    return basic | {"epsilon_low": 0.1, "epsilon_high": 1.2 if kind == "cispo" else 0.3} | changes


@pytest.mark.parametrize(("level", "kind"), ONE_EACH)
def test_grpo_losses_metrics_and_gradients_are_ligers(level, kind, make_completions):
    settings = grpo_settings(level, kind, temperature=0.8)
    assert_same(paired_runs("LigerFusedLinearGRPOLoss", settings, make_completions()))


@pytest.mark.parametrize(("level", "kind"), ONE_EACH)
@pytest.mark.parametrize("corrected", [False, True])
def test_grpo_with_a_kl_term_is_ligers(level, kind, corrected, make_completions):
    settings = grpo_settings(level, kind, beta=0.2, use_bias_correction_kl=corrected)
    assert_same(paired_runs("LigerFusedLinearGRPOLoss", settings, make_completions()))


@pytest.mark.parametrize(
    ("level", "kind", "shape"),
    [(*each, shape) for each in ONE_EACH for shape in ((B,), (B, 1), (B, T))],
)
def test_a_samplers_ratio_weighs_as_ligers(level, kind, shape, make_completions, rng):
    ratio = torch.rand(shape, generator=rng) + 0.3
    ratio[0] = 0
    arguments = make_completions(vllm_is_ratio=ratio)
    if kind == "vespo" and shape == (B, T):
        # Liger multiplies vespo's ratios of masked tokens in, too.
        arguments["vllm_is_ratio"] = torch.where(arguments["attention_mask"] != 0, ratio, 1)
    assert_same(paired_runs("LigerFusedLinearGRPOLoss", grpo_settings(level, kind), arguments))


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
@pytest.mark.parametrize("delta", [1.4, 3.0])
def test_a_two_sided_clip_is_ligers(kind, delta, make_completions):
    settings = grpo_settings("token", kind, delta=delta)
    assert_same(paired_runs("LigerFusedLinearGRPOLoss", settings, make_completions()))


@pytest.mark.parametrize("kind", ["dapo", "cispo", "vespo"])
@pytest.mark.parametrize("items", [0, 7.5, torch.tensor(113)])
def test_the_tokens_of_the_whole_step_normalise_as_in_liger(kind, items, make_completions):
    arguments = make_completions(num_items_in_batch=items)
    assert_same(paired_runs("LigerFusedLinearGRPOLoss", grpo_settings("token", kind), arguments))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_on_policy_with_a_reference_model_is_ligers(level, make_completions, rng):
    arguments = make_completions(old_per_token_logps=None, ref_per_token_logps=None)
    arguments |= {
        "ref_input": torch.randn(B, T, H, generator=rng),
        "ref_weight": 0.3 * torch.randn(V, H, generator=rng),
        "ref_bias": 0.3 * torch.randn(V, generator=rng),
    }
    assert_same(paired_runs("LigerFusedLinearGRPOLoss", grpo_settings(level, "grpo", beta=0.1), arguments))


def test_without_a_reference_model_the_kl_is_zero_as_in_liger(make_completions):
    settings = grpo_settings("token", "dapo", beta=0.3, use_ref_model=False)
    results = paired_runs("LigerFusedLinearGRPOLoss", settings, make_completions())
    assert_same(results)
    assert results[0]["metrics"][0] == 0


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_a_batch_without_a_live_token_gives_zero_loss_and_zero_gradients(kind, make_completions):
    arguments = make_completions(attention_mask=torch.zeros(B, T))
    arguments |= {key: arguments[key].requires_grad_() for key in ("_input", "lin_weight", "bias")}
    module = ours.LigerFusedLinearGRPOLoss(loss_type=kind, max_completion_length=12)

    loss, metrics = module(**arguments)
    loss.backward()

    assert loss == 0 and all(metric == 0 for metric in metrics)
    assert not any(arguments[key].grad.any() for key in ("_input", "lin_weight", "bias"))


@pytest.mark.parametrize("delta", [None, 1.5])
def test_a_luspo_mean_reads_the_padding_as_ligers_does(delta, make_completions, rng):
    ratio = torch.rand(B, T, generator=rng) + 0.3
    arguments = make_completions(vllm_is_ratio=ratio, old_per_token_logps=None)
    settings = grpo_settings("sequence", "luspo", beta=0.3, delta=delta)
    assert_same(paired_runs("LigerFusedLinearGRPOLoss", settings, arguments))


def test_sequence_ratios_are_refused_where_liger_refuses_them(make_completions):
    for kind in ("cispo", "sapo", "vespo"):
        module = ours.LigerFusedLinearGRPOLoss(loss_type=kind, importance_sampling_level="sequence")
        with pytest.raises(ValueError, match="Sequence-level importance sampling is not supported"):
            module(**make_completions())


def test_an_unknown_loss_is_refused_by_name(make_completions):
    with pytest.raises(ValueError, match="'ppo'"):
        ours.LigerFusedLinearGRPOLoss(loss_type="ppo")(**make_completions())


@pytest.mark.parametrize("name", ["sapo_temperature_pos", "sapo_temperature_neg", "delta"])
def test_what_must_be_positive_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        ours.LigerFusedLinearGRPOLoss(**{name: 0.0})


def test_a_kl_without_its_reference_is_refused_with_what_to_give(make_completions):
    with pytest.raises(ValueError, match=r"beta = 0\.04.*ref_per_token_logps"):
        ours.LigerFusedLinearGRPOLoss()(**make_completions(ref_per_token_logps=None))


# --------------------------------------------------------------------------------------------- preference


@pytest.fixture
def make_pairs(rng: torch.Generator):
    def make(**extra: Any) -> dict[str, Any]:
        target = torch.randint(V, (2 * B, T), generator=rng)
        target[torch.rand(2 * B, T, generator=rng) < 0.3] = -100
        target[:, 0] = 1
        tensors = {
            "_input": torch.randn(2 * B, T, H, generator=rng),
            "lin_weight": 0.3 * torch.randn(V, H, generator=rng),
            "target": target,
            "bias": 0.3 * torch.randn(V, generator=rng),
        }
        return {**tensors, **extra}

    return make


@pytest.fixture
def reference(rng: torch.Generator) -> dict[str, Tensor]:
    return {
        "ref_input": torch.randn(2 * B, T, H, generator=rng),
        "ref_weight": 0.3 * torch.randn(V, H, generator=rng),
        "ref_bias": 0.3 * torch.randn(V, generator=rng),
    }


@pytest.mark.parametrize(
    ("kind", "average", "nll", "smoothing"),
    list(itertools.product(("sigmoid", "hinge", "robust"), (False, True), (False, True), (0.0, 0.2))),
)
def test_dpo_is_ligers(kind, average, nll, smoothing, make_pairs, reference):
    settings = {"loss_type": kind, "average_log_prob": average, "compute_nll_loss": nll, "alpha": 0.7}
    settings |= {"label_smoothing": smoothing, "beta": 0.3}
    assert_same(paired_runs("LigerFusedLinearDPOLoss", settings, make_pairs(**reference)))


def test_dpo_without_a_reference_model_is_ligers(make_pairs):
    assert_same(paired_runs("LigerFusedLinearDPOLoss", {"use_ref_model": False}, make_pairs()))


@pytest.mark.parametrize("kind", list(DPO_VARIANTS))
@pytest.mark.parametrize("nll", [False, True])
def test_a_dpo_variant_is_ligers(kind, nll, make_pairs, reference):
    settings = {"loss_type": kind, "compute_nll_loss": nll, "beta": 0.2, "label_smoothing": 0.05}
    results = paired_runs("LigerFusedLinearDPOLoss", settings, make_pairs(**reference))
    # Some of them square or exponentiate sums over a completion.
    scale = max(1.0, results[1]["loss"].item())
    for result in results:
        result["loss"] = result["loss"] / scale
        result["gradients"] = {
            key: None if gradient is None else gradient / scale
            for key, gradient in result["gradients"].items()
        }
    assert_same(results)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss_type": "ipo"}, "'ipo'"),
        ({"loss_type": "exo_pair"}, "label_smoothing"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "label_smoothing"),
    ],
)
def test_a_dpo_setting_that_means_nothing_is_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        ours.LigerFusedLinearDPOLoss(**settings)


@pytest.mark.parametrize("nll", [False, True])
@pytest.mark.parametrize("own_labels", [False, True])
def test_orpo_is_ligers(nll, own_labels, make_pairs, rng):
    arguments = make_pairs()
    if own_labels:
        arguments["nll_target"] = torch.randint(V, (2 * B, T), generator=rng)
    assert_same(paired_runs("LigerFusedLinearORPOLoss", {"compute_nll_loss": nll, "beta": 0.4}, arguments))


@pytest.mark.parametrize("nll", [False, True])
def test_simpo_is_ligers(nll, make_pairs):
    settings = {"compute_nll_loss": nll, "beta": 2.0, "gamma": 0.8, "alpha": 0.4, "label_smoothing": 0.1}
    assert_same(paired_runs("LigerFusedLinearSimPOLoss", settings, make_pairs()))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("nll", [False, True])
def test_cpo_is_ligers(average, nll, make_pairs):
    settings = {"compute_nll_loss": nll, "average_log_prob": average, "alpha": 0.4, "label_smoothing": 0.1}
    assert_same(paired_runs("LigerFusedLinearCPOLoss", settings, make_pairs()))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("kl", [None, torch.tensor(0.3), torch.linspace(0, 0.5, 2 * B)])
@pytest.mark.parametrize("use_ref_model", [False, True])
def test_kto_is_ligers(average, kl, use_ref_model, make_pairs, reference, monkeypatch):
    # Liger marks a dimension that its labels do not have.
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", lambda *_: None)
    labels = torch.tensor([True, False, True, True, False, False, True, False])
    settings = {"use_ref_model": use_ref_model, "average_log_prob": average, "beta": 0.2, "chunk_size": 8}
    arguments = make_pairs(preference_labels=labels, kl=kl, **reference)
    assert_same(paired_runs("LigerFusedLinearKTOLoss", settings, arguments), tolerance=5e-5)


def test_kto_asks_for_labels(make_pairs):
    with pytest.raises(ValueError, match="preference_labels"):
        ours.LigerFusedLinearKTOLoss()(**make_pairs())


def test_a_reference_model_that_is_to_be_used_must_be_given(make_pairs):
    with pytest.raises(ValueError, match="ref_input and ref_weight"):
        ours.LigerFusedLinearDPOLoss()(**make_pairs())


def test_the_settings_come_in_ligers_order_with_ligers_defaults():
    for name in ours.__all__:
        mine, liger = (inspect.signature(getattr(module, name)) for module in (ours, theirs))
        defaults = [{p.name: p.default for p in found.parameters.values()} for found in (mine, liger)]
        assert list(defaults[0].items()) == list(defaults[1].items()), name


def test_the_example_runs_as_it_stands(run_example: Callable[[str], Any]):
    names, printed = run_example("liger_grpo")

    assert names["head"].weight.grad.any() and names["hidden"].grad.any()
    assert "KL" in printed
