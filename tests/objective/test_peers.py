"""Our policy losses against TRL 1.16 itself, called on the same random batch.

`tests/integrations` compares them with Liger's and verl's. Where a peer and the paper
differ we follow the paper, and the test says so.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
