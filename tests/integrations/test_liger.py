"""Our modules against Liger 0.8's of the same name: loss, metrics and gradients on the same random batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_fast.integrations import liger as ours
from grpo_fast.integrations.losses import LOSS_TYPES, TOKEN_MEANS

theirs = pytest.importorskip("liger_kernel.chunked_loss", reason="pip install --no-deps liger-kernel==0.8.5")
B, T, H, V = 4, 9, 16, 40
TRAINED = ("_input", "lin_weight", "bias")


def assert_same(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Compare loss, metrics, and gradients of every leaf by the same call of both modules."""
    results = []
    for module in (ours, theirs):
        leaves = {key: arguments[key].clone().requires_grad_() for key in TRAINED}
        make = module.LigerFusedLinearGRPOLoss(compiled=False, **settings)
        loss, metrics = make(**arguments | leaves)
        (2.5 * loss).backward()
        results.append([loss.detach(), *metrics, *(leaf.grad for leaf in leaves.values())])
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5, check_dtype=False)


@pytest.fixture
def make_completions(rng: torch.Generator):
    def make(**extra: Any) -> dict[str, Any]:
        """Make a batch; a shape among the extra arguments becomes positive weights."""

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return scale * torch.randn(*shape, generator=rng)

        mask = (torch.rand(B, T, generator=rng) < 0.7).long()
        mask[0] = 0  # a completion masked out whole
        mask[1, 0] = 1
        arguments = {"_input": random(B, T, H), "attention_mask": mask, "advantages": random(B)}
        arguments |= {"lin_weight": random(V, H, scale=0.3), "bias": random(V, scale=0.3)}
        arguments |= {"selected_token_ids": torch.randint(V, (B, T), generator=rng)}
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            arguments[name] = random(B, T, scale=0.3) - 4
        for name, value in extra.items():
            arguments[name] = torch.rand(value, generator=rng) + 0.3 if isinstance(value, tuple) else value
        return arguments

    return make


def cases() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Yield level, loss, other settings, other arguments."""
    levels = [("token", kind) for kind in LOSS_TYPES if kind != "luspo"]
    levels += [("sequence", kind) for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")]
    for level, kind in levels:
        yield level, kind, {"temperature": 0.8}, {}
        yield level, kind, {}, {"vllm_is_ratio": (B, 1)}
        if kind != "luspo":
            for corrected in (False, True):
                yield level, kind, {"beta": 0.2, "use_bias_correction_kl": corrected}, {}
            for shape in ((B,), (B, T)):
                yield level, kind, {}, {"vllm_is_ratio": shape}
    for delta in (None, 1.4, 3.0):
        yield "token", "grpo", {"delta": delta}, {}
        yield "sequence", "luspo", {"delta": delta}, {"vllm_is_ratio": (B,)}
    for kind in TOKEN_MEANS:
        for items in (0, 7.5, torch.tensor(113)):
            yield "token", kind, {}, {"num_items_in_batch": items}
    on_policy = {"old_per_token_logps": None, "ref_per_token_logps": None}
    on_policy |= {"ref_input": (B, T, H), "ref_weight": (V, H), "ref_bias": (V,)}
    yield "token", "grpo", {"beta": 0.1}, on_policy
    yield "sequence", "grpo", {"beta": 0.1}, on_policy
    yield "token", "dapo", {"beta": 0.3, "use_ref_model": False}, {}


@pytest.mark.parametrize(("level", "kind", "settings", "extra"), list(cases()))
def test_policy_losses_metrics_and_gradients_are_ligers(level, kind, settings, extra, make_completions):
    arguments = make_completions(**extra)
    if kind == "vespo" and "vllm_is_ratio" in extra:
        # Liger multiplies vespo's ratios of masked tokens in, too.
        ratio, mask = arguments["vllm_is_ratio"], arguments["attention_mask"]
        arguments["vllm_is_ratio"] = torch.where(mask != 0, ratio, 1) if ratio.shape == mask.shape else ratio
    basic = {"loss_type": kind, "importance_sampling_level": level, "max_completion_length": 12, "beta": 0.0}
    basic |= {"epsilon_low": 0.1, "epsilon_high": 1.2 if kind == "cispo" else 0.3}
    assert_same(basic | settings, arguments)


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_a_batch_without_a_live_token_gives_zero_loss_and_zero_gradients(kind, make_completions):
    arguments = make_completions(attention_mask=torch.zeros(B, T))
    arguments |= {key: arguments[key].requires_grad_() for key in TRAINED}

    make = ours.LigerFusedLinearGRPOLoss
    level = {"importance_sampling_level": "sequence", "beta": 0.0} if kind == "luspo" else {}
    loss, metrics = make(loss_type=kind, max_completion_length=12, epsilon_high=1.2, **level)(**arguments)
    loss.backward()

    assert loss == 0 and all(metric == 0 for metric in metrics)
    assert not any(arguments[key].grad.any() for key in TRAINED)


@pytest.mark.parametrize(
    ("settings", "extra", "named"),
    [
        *(
            ({"loss_type": kind, "importance_sampling_level": "sequence"}, {}, "Sequence-level importance")
            for kind in ("cispo", "sapo", "vespo")
        ),
        ({"loss_type": "ppo"}, {}, "'ppo'"),
        ({"loss_type": "luspo", "beta": 0.0}, {}, "averages over padding"),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, {}, "averages over padding"),
        *(({name: 0.0}, {}, name) for name in ("sapo_temperature_pos", "sapo_temperature_neg", "delta")),
        ({}, {"ref_per_token_logps": None}, r"beta = 0\.04.*ref_per_token_logps"),
    ],
)
def test_what_a_policy_loss_cannot_be_is_refused_by_name(settings, extra, named, make_completions):
    with pytest.raises(ValueError, match=named):
        ours.LigerFusedLinearGRPOLoss(**settings)(**make_completions(**extra))


def test_the_settings_come_in_ligers_order_with_ligers_defaults():
    mine, liger = (inspect.signature(module.LigerFusedLinearGRPOLoss) for module in (ours, theirs))
    defaults = [{p.name: p.default for p in found.parameters.values()} for found in (mine, liger)]
    assert list(defaults[0].items()) == list(defaults[1].items())


def test_a_removed_preference_class_names_what_replaces_it():
    with pytest.raises(ImportError, match=r"LigerFusedLinearDPOLoss was removed.*liger_kernel.chunked_loss"):
        from grpo_fast.integrations.liger import LigerFusedLinearDPOLoss  # noqa: F401
