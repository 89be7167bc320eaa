"""NeMo-RL's clipped policy-gradient loss against ours in its place.

What package registries call nemo-rl is an empty 0.0.0: the source comes from a checkout.
"""

from __future__ import annotations

import enum
import inspect
import pickle
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_fast import GRPOLossConfig


@pytest.fixture
def batch(rng: torch.Generator) -> dict[str, Tensor]:
    """(4, 10): ragged answers, one sample masked out."""
    previous = -torch.rand(4, 10, generator=rng) * 3
    noise = [0.4 * torch.randn(4, 10, generator=rng) for _ in range(3)]
    lengths = torch.tensor([[10], [5], [8], [7]])
    return {
        "prev_logprobs": previous,
        "generation_logprobs": previous + noise[0],
        "reference_policy_logprobs": previous + noise[1],
        "current": previous + noise[2],
        "advantages": torch.randn(4, 1, generator=rng).expand(4, 10),
        "token_mask": ((torch.arange(10) >= 2) & (torch.arange(10) < lengths)).float(),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
    }


DEFAULTS: dict[str, Any] = {  # all of it, as 0.6 wants it
    **{"reference_policy_kl_penalty": 0.0, "reference_policy_kl_type": "k3", "token_level_loss": True},
    **{"kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0, "ratio_clip_c": None},
    **{"ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "use_on_policy_kl_approximation": False},
    **{"use_importance_sampling_correction": False, "truncated_importance_sampling_ratio": None},
}
CASES: dict[str, tuple[dict[str, Any], GRPOLossConfig]] = {
    "token level": ({}, GRPOLossConfig("dapo")),
    "sequence level": ({"token_level_loss": False}, GRPOLossConfig("grpo")),
    "dual clip": (
        {"ratio_clip_max": 0.28, "ratio_clip_c": 3.0},
        GRPOLossConfig("dapo", epsilon_low=0.2, epsilon_high=0.28, delta=3.0),
    ),
    "gspo": (
        {"token_level_loss": False, "sequence_level_importance_ratios": True}
        | {"ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4},
        GRPOLossConfig("gspo"),
    ),
    "truncated sampler ratio": (
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"}
        | {"truncated_importance_sampling_ratio": 1.2},
        GRPOLossConfig("dapo", sampler_correction="token_truncate", sampler_clip_max=1.2),
    ),
    "on-policy with KL": (
        {"reference_policy_kl_penalty": 0.1, "force_on_policy_ratio": True},
        GRPOLossConfig("dapo", beta=0.1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_hosts(host, batch, name):
    options, config = CASES[name]
    current = batch.pop("current")
    counts = {"global_valid_seqs": torch.tensor(6.0), "global_valid_toks": torch.tensor(41.0)}
    if on_policy := options.get("force_on_policy_ratio", False):
        batch["prev_logprobs"] = current
        # Since 0.7 the KL has the gradient of sampling, too.
        corrected = (
            "importance_sampling_weights" in inspect.signature(host.loss_functions.calculate_kl).parameters
        )
        config = replace(config, use_bias_correction_kl=corrected)
    current = current[:, 1:].clone().requires_grad_()
    theirs = host.loss_functions.ClippedPGLossFn(
        host.loss_functions.ClippedPGLossConfig(**DEFAULTS | options)
    )
    ours = host.adapter.PolicyLoss(config, exactly_on_policy=on_policy)

    results = []
    for function in (theirs, ours):
        loss, metrics = function(next_token_logprobs=current, data=batch, **counts)
        results.append((loss, torch.autograd.grad(loss, current)[0], metrics))

    (*expected, metrics), (*found, our_metrics) = results
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert ours.loss_type == theirs.loss_type and ours.input_type == theirs.input_type
    shared = {"loss", "token_mult_prob_error", "gen_kl_error", "approx_entropy", "num_valid_samples"}
    shared |= {"kl_penalty"} if config.beta else {"probs_ratio", "probs_ratio_min", "probs_ratio_max"}
    if name == "gspo":  # theirs weighs a sequence's ratio by its tokens
        shared -= {"probs_ratio"}
    for metric in shared:
        assert our_metrics[metric] == pytest.approx(metrics[metric], rel=1e-4, abs=1e-6), metric


class LossInputType(enum.Enum):
    LOGPROB = 1


class LossType(enum.Enum):
    TOKEN_LEVEL = 1
    SEQUENCE_LEVEL = 2


def test_a_loss_has_what_the_trainer_reads_and_travels_to_workers(monkeypatch, batch):
    """On a stand-in for NeMo-RL's names, so that it runs where the real one is not installed."""
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["nemo_rl"].__version__ = "0.6.0"
    interfaces = SimpleNamespace(LossInputType=LossInputType, LossType=LossType)
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.loss.interfaces", interfaces)
    from grpo_fast.integrations.nemo_rl import PolicyLoss

    loss = PolicyLoss(GRPOLossConfig("dapo"), use_fused_linear_logprobs=True)
    value, metrics = loss(batch.pop("current")[:, 1:], batch, torch.tensor(3.0), torch.tensor(20.0))

    assert loss.use_linear_ce_fusion and value.isfinite()
    assert {"loss", "gen_kl_error", "token_mult_prob_error", "num_valid_samples"} <= metrics.keys()
    assert pickle.loads(pickle.dumps(loss)).config == loss.config
    with pytest.raises(ValueError, match="entropy"):
        PolicyLoss(GRPOLossConfig("dapo", entropy_coef=0.1))
