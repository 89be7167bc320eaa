"""NeMo-RL's clipped policy-gradient loss and fused log-probabilities against ours in their place.

The real NeMo-RL source runs here: version 0.6, installed or a checkout in the folder that the environment
variable GRPO_FAST_PEER_SOURCES names; what package registries call nemo-rl is an empty 0.0.0. Ray, Megatron
and the loggers are stubbed where they are not installed, and so is `nemo_rl.models.policy`, which patches
transformers when imported.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_stubs import importable, use_checkout
from torch import Tensor

from grpo_fast import GRPOLossConfig

use_checkout("nemo_rl", ".")
if find_spec("nemo_rl") is None:
    pytest.skip(
        "nemo_rl is not importable: set GRPO_FAST_PEER_SOURCES to a folder with a checkout nemo_rl",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def host() -> Iterator[SimpleNamespace]:
    with importable("nemo_rl"):
        from nemo_rl.algorithms.loss import loss_functions
        from nemo_rl.distributed import model_utils

        from grpo_fast.integrations import nemo_rl as adapter

        yield SimpleNamespace(losses=loss_functions, utils=model_utils, adapter=adapter)


def batch_of(rng: torch.Generator) -> dict[str, Tensor]:
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
        GRPOLossConfig("dapo", beta=0.1, use_bias_correction_kl=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_hosts(host, rng, name):
    options, config = CASES[name]
    options = {"reference_policy_kl_penalty": 0.0} | options
    data = batch_of(rng)
    current = data.pop("current")[:, 1:].clone().requires_grad_()
    counts = {"global_valid_seqs": torch.tensor(6.0), "global_valid_toks": torch.tensor(41.0)}
    on_policy = options.get("force_on_policy_ratio", False)
    theirs = host.losses.ClippedPGLossFn(host.losses.ClippedPGLossConfig(**options))
    ours = host.adapter.PolicyLoss(config, exactly_on_policy=on_policy)

    results = []
    for function in (theirs, ours):
        loss, metrics = function(next_token_logprobs=current, data=data, **counts)
        results.append((loss, torch.autograd.grad(loss, current)[0], metrics))

    (expected, gradient, metrics), (loss, our_gradient, our_metrics) = results
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-5, atol=1e-6)
    assert ours.loss_type == theirs.loss_type and ours.input_type == theirs.input_type
    shared = {"loss", "token_mult_prob_error", "approx_entropy", "num_valid_samples"}
    shared |= {"kl_penalty"} if config.beta else {"probs_ratio", "probs_ratio_min", "probs_ratio_max"}
    if name == "gspo":  # theirs weighs a sequence's ratio by its tokens
        shared -= {"probs_ratio"}
    for metric in shared:
        assert our_metrics[metric] == pytest.approx(metrics[metric], rel=1e-4, abs=1e-6), metric


def test_a_loss_travels_to_workers_and_one_that_needs_the_entropy_is_refused(host):
    loss = host.adapter.PolicyLoss(GRPOLossConfig("cispo"))
    assert pickle.loads(pickle.dumps(loss)).config == loss.config
    with pytest.raises(ValueError, match="entropy"):
        host.adapter.PolicyLoss(GRPOLossConfig("dapo", entropy_coef=0.1))


def test_patching_is_undone_and_an_unknown_version_refused(host, monkeypatch):
    before = host.utils.from_parallel_hidden_states_to_logprobs
    host.adapter.patch()
    host.adapter.patch()
    assert host.utils.from_parallel_hidden_states_to_logprobs is host.adapter.hidden_states_to_logprobs
    host.adapter.unpatch()
    assert host.utils.from_parallel_hidden_states_to_logprobs is before
    monkeypatch.setattr(sys.modules["nemo_rl"], "__version__", "0.7.0", raising=False)
    for refused in (host.adapter.patch, lambda: host.adapter.PolicyLoss(GRPOLossConfig("dapo"))):
        with pytest.raises(ImportError, match=r"0\.7\.0.* 0\.6 "):
            refused()


def test_the_example_runs_as_it_stands(host, run_example):
    names, _ = run_example("nemo_rl_loss")
    assert names["current"].grad.any() and names["metrics"]["num_valid_samples"] == 4
