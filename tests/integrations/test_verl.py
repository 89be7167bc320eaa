"""verl's own fused head and policy losses against ours in their place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_stubs import assert_unchanged_by_patch, with_gradients
from torch import Tensor

from grpo_fast.groups.advantages import group_advantages
from grpo_fast.objective.catalog import CATALOG


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kernel", ["FusedLinearForPPO", "linear_cross_entropy"])
def test_the_fused_head_is_verls_own(host, rng, temperature, kernel):
    hidden = torch.randn(3, 7, 16, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(53, 16, generator=rng, dtype=torch.float64, requires_grad=True)
    batch = hidden, weight, torch.randint(0, 53, (3, 7), generator=rng), temperature
    module = host.torch_functional.FusedLinearForPPO(chunk_size=5)

    def evaluate() -> list[Tensor]:
        patched = host.linear_cross_entropy.linear_cross_entropy is host.adapter.fused_linear_cross_entropy
        if patched and kernel == "linear_cross_entropy":  # whose Triton needs a GPU
            logprobs, entropy = host.linear_cross_entropy.linear_cross_entropy(*batch, "none")
            assert logprobs.shape == (21,)
            for reduction in ("sum", "mean"):
                reduced, _ = host.linear_cross_entropy.linear_cross_entropy(*batch, reduction)
                torch.testing.assert_close(reduced, getattr(logprobs, reduction)())
        else:
            logprobs, entropy = module(*batch)
            assert logprobs.shape == entropy.shape == (3, 7)
        return with_gradients([logprobs.double().view(21), entropy.double().view(21)], [hidden, weight])

    # verl rounds float64 logits of size 20 or so to float32, and entropies weigh the error by as much again.
    assert_unchanged_by_patch(host, evaluate, rtol=1e-4, atol=2e-4)
    with pytest.raises(ValueError, match="reduction"):
        host.linear_cross_entropy.linear_cross_entropy(*batch, "max")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_model_under_verls_forward_returns_our_numbers(host, rng, small_model, backend):
    host.adapter.patch()
    model, ids = small_model(), torch.randint(0, 53, (2, 6), generator=rng)
    logits = model(ids).logits / 0.8
    expected = logits.log_softmax(-1).gather(-1, ids.roll(-1, 1)[..., None])[..., 0]

    forward = getattr(host.dense_common, f"forward_with_{backend}_backend")
    found = forward(model, input_ids=ids, temperature=0.8, return_dict=True)

    torch.testing.assert_close(found.log_probs.reshape(2, 6), expected, rtol=1e-4, atol=1e-5)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(found.entropy.reshape(2, 6), entropy, rtol=1e-4, atol=1e-5)


def covariance(**changes: float) -> dict[str, SimpleNamespace]:
    """Return verl's `policy_loss` section, with its defaults."""
    values = {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    values |= {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 0.1}
    return {"policy_loss": SimpleNamespace(**values | changes)}


def actor(**changes: Any) -> SimpleNamespace:
    """Return the fields of verl's `ActorConfig` that a policy loss reads, with verl's defaults."""
    values = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    values |= {"tau_pos": 1.0, "tau_neg": 1.05, "loss_scale_factor": None, "global_batch_info": {}}
    result = SimpleNamespace(**values | covariance() | changes)
    result.get = lambda name, default=None: getattr(result, name, default)
    return result


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


@pytest.fixture
def batch(host: SimpleNamespace, padded: SimpleNamespace) -> dict[str, Tensor]:
    """What verl gives a policy loss of ours, which is registered; all log-probabilities are below zero."""
    host.adapter.patch()
    new = (padded.new.detach() - 2.5).requires_grad_()
    given = {"old_log_prob": padded.old - 2.5, "log_prob": new}
    return given | {"advantages": padded.advantages, "response_mask": padded.mask}


@pytest.mark.parametrize("info", [{}, STEP], ids=["own counts", "two ranks"])
@pytest.mark.parametrize("name", HOST_LOSSES)
def test_a_policy_loss_is_verls_own(host, rng, batch, monkeypatch, name, info):
    theirs, aggregation, constants = HOST_LOSSES[name]
    monkeypatch.setattr(
        host.core_algos, "ActorConfig", SimpleNamespace
    )  # whose __init__ wants the whole of verl
    plain = theirs in ("vanilla", "sapo")  # the others take weights of sequences, or measure something else
    weights = torch.rand(4, 9, generator=rng, dtype=torch.float64) if plain else None
    options = {"loss_agg_mode": aggregation, "rollout_is_weights": weights}
    options |= {"config": actor(**{"global_batch_info": info, **constants})}

    results = []
    for mode in (theirs, f"grpo_fast_{name}"):
        torch.manual_seed(0)  # clip_cov draws
        loss, metrics = host.core_algos.get_policy_loss_fn(mode)(**batch, **options)
        results.append((loss, *torch.autograd.grad(loss, batch["log_prob"]), metrics))

    (*expected, metrics), (*found, our_metrics) = results
    # verl adds 1e-8 to some denominators.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    for metric in ["actor/ppo_kl"] * plain + ["actor/pg_clipfrac"] * (theirs == "vanilla"):
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
def test_advantages_are_verls(estimator, theirs, ours, host, rng):
    rewards = torch.randn(4, 3, generator=rng, dtype=torch.float64)
    lengths = torch.randint(1, 13, (4, 3), generator=rng)
    mask = (torch.arange(12) < lengths.view(-1, 1)).double()
    last = torch.nn.functional.one_hot(lengths.view(-1) - 1, 12) * rewards.view(-1, 1)

    function = getattr(host.core_algos, f"compute_{estimator}_outcome_advantage")
    expected, _ = function(last, mask, torch.arange(4).repeat_interleave(3).tolist(), **theirs)

    found = group_advantages(rewards, lengths=lengths, **ours).advantages
    torch.testing.assert_close(found.view(-1, 1) * mask, expected)


def test_every_loss_of_the_catalog_is_registered_and_differentiable(host, batch):
    masked = ~batch["response_mask"]
    batch["advantages"][masked] = torch.nan  # never read
    for name in CATALOG:
        loss, _ = host.core_algos.get_policy_loss_fn(f"grpo_fast_{name}")(
            **batch, loss_agg_mode="seq-mean-token-mean", config=actor()
        )
        (gradient,) = torch.autograd.grad(loss, batch["log_prob"])
        assert gradient.isfinite().all() and not gradient[masked].any(), name
    host.adapter.unpatch()
    assert not [name for name in host.core_algos.POLICY_LOSS_REGISTRY if name.startswith("grpo_fast_")]


@pytest.mark.parametrize(
    ("aggregation", "info", "named"),
    [("token-sum", {}, r"actor\.loss_agg_mode"), ("token-mean", {"dp_size": 2}, "batch_num_tokens")],
    ids=["an unknown aggregation", "several ranks without counts of the step"],
)
def test_what_would_divide_by_the_wrong_count_is_refused(host, batch, aggregation, info, named):
    compute = host.core_algos.get_policy_loss_fn("grpo_fast_dapo")
    with pytest.raises(ValueError, match=named):
        compute(**batch, loss_agg_mode=aggregation, config=actor(global_batch_info=info))
