"""verl's own fused head and policy losses against ours in their place.

The real verl runs here; what it imports beside (ray, tensordict, ...) is stubbed where it is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_stubs import importable
from torch import Tensor

from grpo_fast.groups.advantages import group_advantages
from grpo_fast.objective.catalog import CATALOG

if find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def verl() -> Iterator[SimpleNamespace]:
    """The adapter, and verl's own functions as they are without it."""
    with importable("verl"):
        from verl.models.transformers import dense_common
        from verl.trainer.ppo import core_algos
        from verl.utils.experimental import torch_functional
        from verl.utils.kernel import linear_cross_entropy

        before = torch_functional.FusedLinearForPPO.forward, linear_cross_entropy.linear_cross_entropy
        import grpo_fast.integrations.verl as adapter

        yield SimpleNamespace(
            adapter=adapter,
            dense=dense_common,
            algos=core_algos,
            fused=torch_functional,
            kernel=linear_cross_entropy,
            before=before,
        )
        adapter.unpatch()
        del sys.modules["grpo_fast.integrations.verl"]


def rows(rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(3, 7, 16, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(53, 16, generator=rng, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, 53, (3, 7), generator=rng)


def gradients(outputs: tuple[Tensor, Tensor], leaves: tuple[Tensor, ...]) -> list[Tensor]:
    logprobs, entropy = (output.flatten().double() for output in outputs)
    scale = torch.linspace(-1, 2, logprobs.numel(), dtype=torch.float64)
    loss = (scale * logprobs).sum() + (scale.flip(0) * entropy).sum()
    return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]


def test_importing_the_adapter_patches_and_unpatching_restores(verl):
    forward, kernel = verl.before
    assert verl.kernel.linear_cross_entropy is verl.adapter.fused_linear_cross_entropy
    assert verl.fused.FusedLinearForPPO.forward is not forward

    verl.adapter.unpatch()
    assert verl.kernel.linear_cross_entropy is kernel
    assert verl.fused.FusedLinearForPPO.forward is forward
    assert not [name for name in verl.algos.POLICY_LOSS_REGISTRY if name.startswith("grpo_fast_")]

    verl.adapter.patch()
    verl.adapter.patch()
    assert verl.algos.get_policy_loss_fn("grpo_fast_dapo")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_fused_head_is_verls_own(verl, rng, temperature):
    hidden, weight, labels = rows(rng)
    module = verl.fused.FusedLinearForPPO(chunk_size=5)
    forward, _ = verl.before
    expected = gradients(forward(module, hidden, weight, labels, temperature), (hidden, weight))

    found = module(hidden, weight, labels, temperature)
    assert found[0].shape == found[1].shape == labels.shape
    # verl rounds float64 logits of size 20 or so to float32, and entropies weigh the error by as much again.
    rounding = {"rtol": 1e-4, "atol": 2e-4}
    torch.testing.assert_close(gradients(found, (hidden, weight)), expected, **rounding)

    kernel = verl.kernel.linear_cross_entropy(hidden, weight, labels, temperature, "none")
    assert kernel[0].shape == (21,)
    torch.testing.assert_close(gradients(kernel, (hidden, weight)), expected, **rounding)
    for reduction in ("sum", "mean"):
        reduced, _ = verl.kernel.linear_cross_entropy(hidden, weight, labels, temperature, reduction)
        torch.testing.assert_close(reduced, getattr(kernel[0], reduction)())
    with pytest.raises(ValueError, match="reduction"):
        verl.kernel.linear_cross_entropy(hidden, weight, labels, 1.0, "max")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_model_under_verls_forward_returns_our_numbers(verl, rng, small_model, backend):
    model = small_model()
    ids = torch.randint(0, 53, (2, 6), generator=rng)
    logits = model(ids).logits / 0.8
    expected = logits.log_softmax(-1).gather(-1, ids.roll(-1, 1)[..., None])[..., 0]

    forward = getattr(verl.dense, f"forward_with_{backend}_backend")
    found = forward(model, input_ids=ids, temperature=0.8, return_dict=True)

    torch.testing.assert_close(found.log_probs.reshape(2, 6), expected, rtol=1e-4, atol=1e-5)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(found.entropy.reshape(2, 6), entropy, rtol=1e-4, atol=1e-5)


def covariance(**changes: float) -> dict[str, SimpleNamespace]:
    """verl's `policy_loss` section with its defaults."""
    values = {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    values |= {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 0.1}
    return {"policy_loss": SimpleNamespace(**values | changes)}


def actor(**changes: Any) -> SimpleNamespace:
    """The fields of verl's `ActorConfig` that a policy loss reads, with verl's defaults."""
    values = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    values |= {"tau_pos": 1.0, "tau_neg": 1.05, "loss_scale_factor": None, "global_batch_info": {}}
    result = SimpleNamespace(**values | covariance() | changes)
    result.get = lambda name, default=None: getattr(result, name, default)
    return result


def arguments(padded: SimpleNamespace) -> dict[str, Tensor]:
    mask, advantages = padded.mask, padded.advantages
    named = {"old_log_prob": padded.old, "log_prob": padded.new}
    return {**named, "advantages": advantages, "response_mask": mask}


SEQUENCES = "seq-mean-token-mean"
STEP = {"dp_size": 2, "batch_num_tokens": 57, "global_batch_size": 8}
HOST_LOSSES: dict[str, tuple[str, str, dict[str, Any]]] = {  # verl's loss, its average, constants
    "dapo": ("vanilla", "seq-mean-token-sum", {}),
    "grpo": ("vanilla", "token-mean", {}),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm", {}),
    "sapo": ("sapo", SEQUENCES, {}),
    "gspo": ("gspo", SEQUENCES, {"clip_ratio_low": 0.1}),
    "gspo_token": ("gspo", SEQUENCES, {"clip_ratio_low": 0.1}),
    "gpg": ("gpg", "token-mean", {}),
    # Its mean over completions counts empty ones, as only a step's counts tell ours.
    "gmpo": ("geo_mean", SEQUENCES, {"clip_ratio_low": 0.4, "global_batch_info": STEP}),
    # verl bounds the ratio to 1 ± ε; the paper lets the lower bound go and so do we, hence ε_low = 1.
    "cispo": ("cispo", "token-mean", {"clip_ratio_low": 1.0}),
    "dppo_tv": ("dppo_tv", "token-mean", {"clip_ratio_low": 0.01, "clip_ratio_c": 20.0}),
    "dppo_kl": ("dppo_kl", "token-mean", {"clip_ratio_low": 0.01, "clip_ratio_c": 20.0}),
    "clip_cov": ("clip_cov", "token-mean", covariance(clip_cov_ratio=0.2, clip_cov_lb=0.05, clip_cov_ub=2.0)),
    "kl_cov": ("kl_cov", "token-mean", covariance(kl_cov_ratio=0.2, ppo_kl_coef=0.7)),
}


@pytest.mark.parametrize("info", [{}, STEP], ids=["own counts", "two ranks"])
@pytest.mark.parametrize("name", HOST_LOSSES)
def test_a_policy_loss_is_verls_own(verl, rng, padded, monkeypatch, name, info):
    host, aggregation, constants = HOST_LOSSES[name]
    config = actor(**{"global_batch_info": info, **constants})
    padded.old, padded.new = padded.old - 2.5, (padded.new.detach() - 2.5).requires_grad_()  # below zero
    batch = arguments(padded)
    monkeypatch.setattr(verl.algos, "ActorConfig", SimpleNamespace)  # whose __init__ wants the whole of verl
    plain = host in ("vanilla", "sapo")  # the others take weights of sequences, or measure something else
    weights = torch.rand(4, 9, generator=rng, dtype=torch.float64) if plain else None

    results = []
    for mode in (host, f"grpo_fast_{name}"):
        torch.manual_seed(0)  # clip_cov draws
        loss, metrics = verl.algos.get_policy_loss_fn(mode)(
            **batch, loss_agg_mode=aggregation, config=config, rollout_is_weights=weights
        )
        results.append((loss, torch.autograd.grad(loss, batch["log_prob"])[0], metrics))

    (loss, gradient, metrics), (our_loss, our_gradient, our_metrics) = results
    # verl adds 1e-8 to some denominators.
    torch.testing.assert_close(our_loss, loss, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-6, atol=1e-8)
    for metric in ["actor/ppo_kl"] * plain + ["actor/pg_clipfrac"] * (host == "vanilla"):
        assert our_metrics[metric] == pytest.approx(metrics[metric], abs=1e-6)
    assert all(isinstance(value, float) for value in our_metrics.values())


@pytest.mark.parametrize(
    ("estimator", "theirs", "ours"),
    [
        ("grpo", {"epsilon": 1e-4}, {}),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, {"scale_rewards": "none"}),
        ("rloo", {}, {"scale_rewards": "none", "baseline": "leave_one_out"}),
        ("reinforce_plus_plus_baseline", {}, {"scale_rewards": "whiten"}),
    ],
)
def test_advantages_are_verls(estimator, theirs, ours, verl, rng):
    rewards = torch.randn(4, 3, generator=rng, dtype=torch.float64)
    lengths = torch.randint(1, 13, (4, 3), generator=rng)
    mask = (torch.arange(12) < lengths.view(-1, 1)).double()
    last = torch.nn.functional.one_hot(lengths.view(-1) - 1, 12) * rewards.view(-1, 1)

    function = getattr(verl.algos, f"compute_{estimator}_outcome_advantage")
    expected, _ = function(last, mask, torch.arange(4).repeat_interleave(3).tolist(), **theirs)

    found = group_advantages(rewards, lengths=lengths, **ours).advantages
    torch.testing.assert_close(found.view(-1, 1) * mask, expected)


def test_every_loss_of_the_catalogue_is_registered_and_differentiable(verl, padded):
    padded.advantages[~padded.mask] = torch.nan  # never read
    for name in CATALOG:
        batch = arguments(padded)
        loss, _ = verl.algos.get_policy_loss_fn(f"grpo_fast_{name}")(
            **batch, loss_agg_mode="seq-mean-token-mean", config=actor()
        )
        (gradient,) = torch.autograd.grad(loss, batch["log_prob"])
        assert gradient.isfinite().all() and not gradient[~batch["response_mask"]].any(), name


@pytest.mark.parametrize(
    ("aggregation", "info", "named"),
    [("token-sum", {}, r"actor\.loss_agg_mode"), ("token-mean", {"dp_size": 2}, "batch_num_tokens")],
    ids=["an unknown aggregation", "several ranks without counts of the step"],
)
def test_what_would_divide_by_the_wrong_count_is_refused(verl, padded, aggregation, info, named):
    compute = verl.algos.get_policy_loss_fn("grpo_fast_dapo")
    with pytest.raises(ValueError, match=named):
        compute(**arguments(padded), loss_agg_mode=aggregation, config=actor(global_batch_info=info))


def test_the_example_runs_as_it_stands(verl, run_example):
    names, printed = run_example("verl_losses")
    assert names["out"].log_probs.shape == names["ids"].shape and "loss_mode=grpo_fast_dapo" in printed
