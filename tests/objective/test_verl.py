"""Our losses against verl 0.9's, called on the same random batch."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.objective import GRPOLossConfig, policy_loss
from grpo_fast.objective.loss import kl_estimate

MAX_LENGTH = 12


class ActorConfig(SimpleNamespace):
    """The attributes that verl's policy losses read."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def verl_losses() -> Iterator[types.ModuleType]:
    """verl's `core_algos`, with the packages around it (ray, hydra, tensordict) left out."""
    found = importlib.util.find_spec("verl")
    if found is None:
        pytest.skip("pip install --no-deps verl==0.9.1")
    root = found.submodule_search_locations[0]

    def module(name: str, path: str | None = None, **contents: Any) -> None:
        stub = types.ModuleType(name)
        stub.__dict__.update(contents)
        stub.__spec__ = importlib.util.spec_from_loader(name, None)
        if path is not None:
            stub.__path__ = [path]
        patch.setitem(sys.modules, name, stub)

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
            patch.delitem(sys.modules, name)
        module("verl", root)
        module("verl.utils", f"{root}/utils", as_torch_index=None, group_mean_std=None)
        module("verl.trainer", f"{root}/trainer")
        module("verl.trainer.ppo", f"{root}/trainer/ppo")
        module("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
        module("verl.workers")
        module("verl.workers.config", ActorConfig=ActorConfig)
        if importlib.util.find_spec("omegaconf") is None:
            module("omegaconf", DictConfig=dict)
        if importlib.util.find_spec("tensordict") is None:
            module("tensordict", TensorDict=dict)
        yield importlib.import_module("verl.trainer.ppo.core_algos")
        for name in [name for name in sys.modules if name.startswith("verl")]:
            del sys.modules[name]


VERL_CASES: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    # our loss: our constants; verl's loss, aggregation and constants
    "grpo": ({"delta": 3.0}, "vanilla", "seq-mean-token-mean", {"clip_ratio_c": 3.0}),
    "dapo": ({"delta": 3.0}, "vanilla", "token-mean", {"clip_ratio_c": 3.0}),
    "dr_grpo": ({"delta": 9.0}, "vanilla", "seq-mean-token-sum-norm", {"clip_ratio_c": 9.0}),
    "gspo": ({"epsilon_low": 0.1, "epsilon_high": 0.3}, "gspo", "seq-mean-token-mean", {}),
    "gspo_token": ({"epsilon_low": 0.1, "epsilon_high": 0.3}, "gspo", "seq-mean-token-mean", {}),
    "sapo": ({"sapo_temperature_neg": 1.5}, "sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.5}),
    "gpg": ({}, "gpg", "token-mean", {}),
    "gmpo": ({"epsilon_low": 0.4}, "geo_mean", "", {}),
    # verl bounds the ratio to 1 ± ε; the paper lets the lower bound go and so do we, hence ε_low = 1.
    "cispo": ({"epsilon_high": 5.0}, "cispo", "token-mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
    "dppo_tv": ({}, "dppo_tv", "token-mean", {"clip_ratio_c": 20.0}),
    "dppo_kl": ({}, "dppo_kl", "token-mean", {"clip_ratio_c": 20.0}),
    "clip_cov": (
        {"clip_cov_ratio": 0.2, "clip_cov_low": 0.05, "clip_cov_high": 2.0},
        "clip_cov",
        "token-mean",
        {"policy_loss": SimpleNamespace(clip_cov_ratio=0.2, clip_cov_lb=0.05, clip_cov_ub=2.0)},
    ),
    "kl_cov": (
        {"kl_cov_ratio": 0.2, "kl_cov_coef": 0.7},
        "kl_cov",
        "token-mean",
        {"policy_loss": SimpleNamespace(kl_cov_ratio=0.2, ppo_kl_coef=0.7)},
    ),
}


@pytest.mark.parametrize("loss_type", list(VERL_CASES))
def test_loss_and_gradient_are_verls(
    loss_type: str, make_batch: Callable, assert_same: Callable, verl_losses: types.ModuleType
) -> None:
    constants, name, aggregation, theirs_constants = VERL_CASES[loss_type]
    # GSPO's value differs from verl's beyond its cap of e^10 on the ratio; elsewhere the whole range is used.
    batch = make_batch()
    config = GRPOLossConfig(loss_type, max_completion_length=MAX_LENGTH, **constants)
    actor = ActorConfig(
        **{
            "clip_ratio": config.epsilon_low,
            "clip_ratio_low": config.epsilon_low,
            "clip_ratio_high": config.epsilon_high,
            "global_batch_info": {"loss_scale_factor": MAX_LENGTH} if loss_type == "dr_grpo" else {},
            **theirs_constants,
        }
    )
    advantages = batch.advantages[:, None].expand_as(batch.mask)

    torch.manual_seed(0)  # clip_cov draws
    theirs, _ = verl_losses.get_policy_loss_fn(name)(
        batch.old, batch.logprobs, advantages, batch.mask.double(), aggregation, actor
    )
    torch.manual_seed(0)
    ours = policy_loss(batch.inputs(), config).loss

    assert_same(batch, ours, theirs, rtol=1e-6)  # verl adds 1e-8 to its denominators


def test_reinforce_is_verls(
    make_batch: Callable, assert_same: Callable, verl_losses: types.ModuleType
) -> None:
    batch = make_batch()

    theirs, _ = verl_losses.compute_policy_loss_reinforce(
        batch.sampler,
        batch.logprobs,
        batch.advantages[:, None].expand_as(batch.mask),
        batch.mask.double(),
        config=ActorConfig(global_batch_info={}),
    )

    assert_same(batch, policy_loss(batch.inputs(), GRPOLossConfig("reinforce")).loss, theirs)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_are_verls(estimator: str, make_batch: Callable, verl_losses: types.ModuleType) -> None:
    batch = make_batch()

    theirs = verl_losses.kl_penalty(batch.logprobs, batch.ref, estimator)

    torch.testing.assert_close(kl_estimate(batch.logprobs, batch.ref, estimator), theirs)


def test_verl_leaves_empty_completions_out_of_the_mean_and_trl_and_we_count_them(
    make_batch: Callable, assert_same: Callable, verl_losses: types.ModuleType
) -> None:
    """The paper's 1/G counts every completion of the group."""
    batch = make_batch(empty=True)
    size = len(batch.lengths)
    actor = ActorConfig(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=math.inf, global_batch_info={}
    )

    theirs, _ = verl_losses.get_policy_loss_fn("vanilla")(
        batch.old,
        batch.logprobs,
        batch.advantages[:, None].expand_as(batch.mask),
        batch.mask.double(),
        "seq-mean-token-mean",
        actor,
    )
    ours = policy_loss(batch.inputs(), GRPOLossConfig("grpo")).loss

    assert_same(batch, ours * size / (size - 1), theirs, rtol=1e-6)
