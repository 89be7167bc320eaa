"""Our policy losses against TRL 1.16 and verl 0.9 themselves, called on the same random batch.

`tests/integrations/test_liger.py` compares them with Liger's. Where a peer and the paper
differ we follow the paper, and the test says so.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.groups.advantages import group_advantages
from grpo_fast.objective import GRPOLossConfig, policy_loss

TRL = "pip install --no-deps trl==1.16.0"
MAX_LENGTH = 12
CONSTANTS: dict[str, dict[str, Any]] = {  # of TRL's losses
    "grpo": {},
    "bnpo": {"epsilon_high": 0.28, "epsilon_low": 0.2},
    "dr_grpo": {"delta": 2.5},
    "dapo": {"epsilon_high": 0.28, "epsilon_low": 0.2, "delta": 4.0},
    "gspo": {"epsilon_low": 0.2},
    "luspo": {"epsilon_low": 0.2, "epsilon_high": 0.4},
    "cispo": {"epsilon_high": 5.0},
    "sapo": {"sapo_temperature_neg": 1.5},
    "vespo": {},
}
trl_losses = pytest.mark.parametrize("loss_type", list(CONSTANTS))
Peer = Callable[..., Any]


def trl_config(loss_type: str, **changes: Any) -> GRPOLossConfig:
    return GRPOLossConfig(loss_type, max_completion_length=MAX_LENGTH, **(CONSTANTS[loss_type] | changes))


def our_loss(batch: Any, config: GRPOLossConfig) -> torch.Tensor:
    return policy_loss(batch.inputs(), config).loss


# --------------------------------------------------------------------------------------------------- TRL


@pytest.fixture
def trl_step(accelerator: Any) -> Peer:
    """`trl_step(trainer class, batch, inputs, attributes)`: `_compute_loss` on an object that has just what
    it reads, and the metrics that it notes."""

    def step(cls: Any, batch: Any, inputs: dict[str, Any], **attributes: Any) -> tuple[Any, dict[str, float]]:
        trainer = SimpleNamespace(
            accelerator=accelerator,
            aux_loss_enabled=False,
            model=SimpleNamespace(training=True),
            _get_per_token_logps_and_entropies=lambda *a, **k: (batch.logprobs, batch.entropy, None),
            _metrics={"train": defaultdict(list)},
            **attributes,
        )
        if hasattr(cls, "get_high_entropy_mask"):
            trainer.get_high_entropy_mask = types.MethodType(cls.get_high_entropy_mask, trainer)
        blank = torch.zeros(batch.mask.shape, dtype=torch.int64)
        given = {
            **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), blank),
            "completion_mask": batch.mask.long(),
            "advantages": batch.advantages,
            **inputs,
        }
        loss = cls._compute_loss(trainer, trainer.model, given)
        return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}

    return step


@pytest.fixture
def trl_grpo(trl_step: Peer) -> Peer:
    """`trl_grpo(batch, config, **inputs)`: the loss of `GRPOTrainer` and its metrics."""
    cls = pytest.importorskip("trl", reason=TRL).GRPOTrainer

    def call(batch: Any, c: GRPOLossConfig, **inputs: Any) -> tuple[torch.Tensor, dict[str, float]]:
        settings = vars(c) | {
            "importance_sampling_level": "sequence" if c.ratio_level == "sequence" else "token",
            "loss_type": "grpo" if c.loss_type == "gspo" else c.loss_type,
        }
        known = {"old_per_token_logps": batch.old, "ref_per_token_logps": batch.ref}
        return trl_step(
            cls,
            batch,
            {"num_items_in_batch": batch.mask.sum(), **known, **inputs},
            args=SimpleNamespace(**vars(c), steps_per_generation=1),
            current_gradient_accumulation_steps=1,
            use_vllm="importance_sampling_ratio" in inputs,
            vllm_importance_sampling_correction="importance_sampling_ratio" in inputs,
            _entropy_bonus_enabled=c.entropy_coef != 0,
            get_off_policy_mask=cls.get_off_policy_mask,
            get_gamma_weights=cls.get_gamma_weights,
            **settings,
        )

    return call


@trl_losses
def test_loss_gradient_and_metrics_are_trls(loss_type, make_batch, assert_same, trl_grpo):
    for empty in (False, True):
        batch, config = make_batch(empty=empty), trl_config(loss_type, beta=0.0 if empty else 0.1)
        ours, (theirs, metrics) = policy_loss(batch.inputs(), config), trl_grpo(batch, config)
        assert_same(batch, ours.loss, theirs)
        if not empty and loss_type in ("grpo", "dapo", "gspo"):
            assert {name: ours.metrics[name].item() for name in metrics} == pytest.approx(metrics, rel=1e-6)


@trl_losses
def test_all_extra_terms_together_are_trls(loss_type, make_batch, assert_same, trl_grpo):
    batch = make_batch(spread=0.6)
    config = trl_config(
        loss_type,
        beta=0.04,
        # DeepSeek-V3.2, eq. 7, weighs a token's KL with its own ratio, TRL with the surrogate's.
        use_bias_correction_kl=loss_type not in ("gspo", "luspo"),
        entropy_coef=0.01,
        top_entropy_quantile=0.625,
        off_policy_mask_threshold=0.05,
        sampler_correction="token_truncate",
        sampler_clip_max=1.2,
    )
    ratio = (batch.old - torch.where(batch.mask, batch.sampler, batch.old)).exp().clamp(max=1.2)

    theirs, _ = trl_grpo(
        batch, config, importance_sampling_ratio=ratio, sampling_per_token_logps=batch.sampler
    )

    assert_same(batch, our_loss(batch, config), theirs)


def test_rloo_is_trls_rloo_trainer(make_batch, assert_same, trl_step):
    """Its `_compute_loss` keeps KL in the reward, as `kl_in_reward` does here."""
    trl = pytest.importorskip("trl", reason=TRL)
    batch, config = make_batch(spread=0.6), GRPOLossConfig("rloo", epsilon_low=0.2)
    constants = {"args": SimpleNamespace(), "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2}

    theirs, _ = trl_step(trl.RLOOTrainer, batch, {"old_logps": (batch.old * batch.mask).sum(1)}, **constants)

    assert_same(batch, our_loss(batch, config), theirs)


# -------------------------------------------------------------------------------------------------- verl


class ActorConfig(SimpleNamespace):
    """The attributes that verl's policy losses read."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def verl() -> Iterator[types.ModuleType]:
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
        for name, contents in (("omegaconf", {"DictConfig": dict}), ("tensordict", {"TensorDict": dict})):
            if importlib.util.find_spec(name) is None:
                module(name, **contents)
        yield importlib.import_module("verl.trainer.ppo.core_algos")
        for name in [name for name in sys.modules if name.startswith("verl")]:
            del sys.modules[name]


SEQUENCES = "seq-mean-token-mean"
RANGE = {"epsilon_low": 0.1, "epsilon_high": 0.3}
CLIP_COV, KL_COV = {"clip_cov_ratio": 0.2}, {"kl_cov_ratio": 0.2}
SCALED = {"clip_ratio_c": 9.0, "global_batch_info": {"loss_scale_factor": MAX_LENGTH}}
VERL_CASES: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    # our loss: our constants; verl's loss, aggregation and constants
    "grpo": ({"delta": 3.0}, "vanilla", SEQUENCES, {"clip_ratio_c": 3.0}),
    "dapo": ({"delta": 3.0}, "vanilla", "token-mean", {"clip_ratio_c": 3.0}),
    "dr_grpo": ({"delta": 9.0}, "vanilla", "seq-mean-token-sum-norm", SCALED),
    "gspo": (RANGE, "gspo", SEQUENCES, {}),
    "gspo_token": (RANGE, "gspo", SEQUENCES, {}),
    "sapo": ({"sapo_temperature_neg": 1.5}, "sapo", SEQUENCES, {"tau_pos": 1.0, "tau_neg": 1.5}),
    "gpg": ({}, "gpg", "token-mean", {}),
    "gmpo": ({"epsilon_low": 0.4}, "geo_mean", "", {}),
    # verl bounds the ratio to 1 ± ε; the paper lets the lower bound go and so do we, hence ε_low = 1.
    "cispo": ({"epsilon_high": 5.0}, "cispo", "token-mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
    "dppo_tv": ({}, "dppo_tv", "token-mean", {"clip_ratio_c": 20.0}),
    "dppo_kl": ({}, "dppo_kl", "token-mean", {"clip_ratio_c": 20.0}),
    "clip_cov": (
        CLIP_COV | {"clip_cov_low": 0.05, "clip_cov_high": 2.0},
        "clip_cov",
        "token-mean",
        {"policy_loss": SimpleNamespace(**CLIP_COV, clip_cov_lb=0.05, clip_cov_ub=2.0)},
    ),
    "kl_cov": (
        KL_COV | {"kl_cov_coef": 0.7},
        "kl_cov",
        "token-mean",
        {"policy_loss": SimpleNamespace(**KL_COV, ppo_kl_coef=0.7)},
    ),
}


def verl_loss(
    verl: types.ModuleType, batch: Any, config: GRPOLossConfig, name: str, aggregation: str, **constants: Any
) -> torch.Tensor:
    low, high = config.epsilon_low, config.epsilon_high
    actor = {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high, "global_batch_info": {}}
    advantages, mask = batch.advantages[:, None].expand_as(batch.mask), batch.mask.double()
    function, settings = verl.get_policy_loss_fn(name), ActorConfig(**actor | constants)
    return function(batch.old, batch.logprobs, advantages, mask, aggregation, settings)[0]


@pytest.mark.parametrize("loss_type", list(VERL_CASES))
def test_loss_and_gradient_are_verls(loss_type, make_batch, assert_same, verl):
    constants, name, aggregation, theirs_constants = VERL_CASES[loss_type]
    # GSPO's value differs from verl's beyond its cap of e^10 on the ratio; elsewhere the whole range is used.
    batch = make_batch()
    config = GRPOLossConfig(loss_type, max_completion_length=MAX_LENGTH, **constants)

    torch.manual_seed(0)  # clip_cov draws
    theirs = verl_loss(verl, batch, config, name, aggregation, **theirs_constants)
    torch.manual_seed(0)

    # verl adds 1e-8 to its denominators.
    assert_same(batch, our_loss(batch, config), theirs, rtol=1e-6)


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
    lengths = torch.randint(1, MAX_LENGTH + 1, (4, 3), generator=rng)
    mask = (torch.arange(MAX_LENGTH) < lengths.view(-1, 1)).double()
    last = torch.nn.functional.one_hot(lengths.view(-1) - 1, MAX_LENGTH) * rewards.view(-1, 1)

    function = getattr(verl, f"compute_{estimator}_outcome_advantage")
    expected, _ = function(last, mask, torch.arange(4).repeat_interleave(3).tolist(), **theirs)

    found = group_advantages(rewards, lengths=lengths, **ours).advantages
    torch.testing.assert_close(found.view(-1, 1) * mask, expected)
