"""Our losses against TRL 1.16's `_compute_loss`, called on the same random batch."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.objective import GRPOLossConfig, policy_loss
from grpo_fast.objective.loss import kl_estimate

MAX_LENGTH = 12


class Accelerator:
    """One process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values

    def pad_across_processes(self, values: torch.Tensor, dim: int, pad_index: float) -> torch.Tensor:
        return values


def trl_loss(
    batch: Any, config: GRPOLossConfig, **inputs: Any
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """`GRPOTrainer._compute_loss` on an object that has just what it reads."""
    trl = pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0")
    c = config
    args = SimpleNamespace(
        **{name: getattr(c, name) for name in ("delta", "use_bias_correction_kl")},
        **{name: getattr(c, name) for name in ("sapo_temperature_pos", "sapo_temperature_neg")},
        **{
            f"vespo_{name}": getattr(c, f"vespo_{name}")
            for name in ("k_pos", "k_neg", "lambda_pos", "lambda_neg")
        },
        steps_per_generation=1,
    )
    trainer = SimpleNamespace(
        args=args,
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        model=SimpleNamespace(training=True),
        beta=c.beta,
        current_gradient_accumulation_steps=1,
        entropy_coef=c.entropy_coef,
        epsilon_high=c.epsilon_high,
        epsilon_low=c.epsilon_low,
        importance_sampling_level="sequence" if c.ratio_level == "sequence" else "token",
        loss_type="grpo" if c.loss_type == "gspo" else c.loss_type,
        max_completion_length=c.max_completion_length,
        off_policy_mask_threshold=c.off_policy_mask_threshold,
        top_entropy_quantile=c.top_entropy_quantile,
        use_adaptive_entropy=False,
        use_vllm="importance_sampling_ratio" in inputs,
        vllm_importance_sampling_correction="importance_sampling_ratio" in inputs,
        _entropy_bonus_enabled=c.entropy_coef != 0,
        _metrics={"train": defaultdict(list)},
    )
    cls = trl.GRPOTrainer
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (batch.logprobs, batch.entropy, None)
    trainer.get_off_policy_mask = cls.get_off_policy_mask
    trainer.get_gamma_weights = cls.get_gamma_weights
    trainer.get_high_entropy_mask = types.MethodType(cls.get_high_entropy_mask, trainer)
    blank = torch.zeros(batch.mask.shape, dtype=torch.int64)
    everything = {
        "prompt_ids": blank,
        "prompt_mask": blank,
        "completion_ids": blank,
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.ref,
        "num_items_in_batch": batch.mask.sum(),
        **inputs,
    }
    loss = cls._compute_loss(trainer, SimpleNamespace(training=True), everything)
    return loss, trainer._metrics["train"]


CONSTANTS: dict[str, dict[str, Any]] = {
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


def trl_config(loss_type: str, **changes: Any) -> GRPOLossConfig:
    return GRPOLossConfig(loss_type, max_completion_length=MAX_LENGTH, **(CONSTANTS[loss_type] | changes))


@pytest.mark.parametrize("empty", [False, True], ids=["", "one completion masked out"])
@pytest.mark.parametrize("loss_type", list(CONSTANTS))
def test_loss_and_gradient_are_trls(
    loss_type: str, empty: bool, make_batch: Callable, assert_same: Callable
) -> None:
    batch, config = make_batch(empty=empty), trl_config(loss_type)

    assert_same(batch, policy_loss(batch.inputs(), config).loss, trl_loss(batch, config)[0])


@pytest.mark.parametrize("loss_type", list(CONSTANTS))
def test_all_extra_terms_together_are_trls(
    loss_type: str, make_batch: Callable, assert_same: Callable
) -> None:
    batch = make_batch(spread=0.6)
    config = trl_config(
        loss_type,
        beta=0.04,
        use_bias_correction_kl=loss_type not in ("gspo", "luspo"),  # see the next test
        entropy_coef=0.01,
        top_entropy_quantile=0.625,
        off_policy_mask_threshold=0.05,
        sampler_correction="token_truncate",
        sampler_clip_max=1.2,
    )
    sampler = torch.where(batch.mask, batch.sampler, batch.old)
    ratio = (batch.old - sampler).exp().clamp(max=1.2)

    theirs, _ = trl_loss(
        batch, config, importance_sampling_ratio=ratio, sampling_per_token_logps=batch.sampler
    )

    assert_same(batch, policy_loss(batch.inputs(), config).loss, theirs)


def test_the_kl_correction_uses_the_tokens_own_ratio_where_trl_spreads_the_sequences(
    make_batch: Callable,
) -> None:
    """DeepSeek-V3.2, eq. 7, weighs a token's KL with the token's ratio. TRL takes the surrogate's ratio, so
    with a sequence-level loss the gradient is not the KL's. We follow the paper.
    """
    batch = make_batch(spread=0.6)
    plain = trl_config("gspo")
    corrected = trl_config("gspo", beta=1.0, use_bias_correction_kl=True)

    def kl_term(loss: Callable[[GRPOLossConfig], torch.Tensor]) -> torch.Tensor:
        return loss(corrected) - loss(plain)

    ours = kl_term(lambda config: policy_loss(batch.inputs(), config).loss)
    theirs = kl_term(lambda config: trl_loss(batch, config)[0])

    per_token = kl_estimate(batch.logprobs, batch.ref, "k3") * (batch.logprobs - batch.old).exp()
    expected = ((per_token * batch.mask).sum(1) / batch.mask.sum(1)).mean()
    torch.testing.assert_close(ours, expected)
    assert not torch.isclose(theirs, expected)


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate", "token_mask"])
def test_sampler_corrections_are_trls(mode: str, make_batch: Callable, assert_same: Callable) -> None:
    batch = make_batch(spread=0.6)
    config = GRPOLossConfig(sampler_correction=mode, sampler_clip_min=0.8, sampler_clip_max=1.25)
    log_ratio = (batch.old - batch.sampler) * batch.mask
    ratio = (log_ratio.sum(1, keepdim=True) if mode.startswith("sequence") else log_ratio).exp()
    outside = (ratio < 0.8) | (ratio > 1.25)
    ratio = ratio.masked_fill(outside, 0) if mode.endswith("mask") else ratio.clamp(0.8, 1.25)

    theirs, _ = trl_loss(batch, config, importance_sampling_ratio=ratio)

    assert_same(batch, policy_loss(batch.inputs(), config).loss, theirs)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "gspo"])
def test_metrics_are_trls(loss_type: str, make_batch: Callable) -> None:
    batch, config = make_batch(), trl_config(loss_type, beta=0.1)

    ours = policy_loss(batch.inputs(), config).metrics
    _, theirs = trl_loss(batch, config)

    assert {name: ours[name].item() for name in theirs} == pytest.approx(
        {name: value for name, (value,) in theirs.items()}, rel=1e-6
    )


def test_rloo_is_trls_rloo_trainer(make_batch: Callable, assert_same: Callable) -> None:
    """Its `_compute_loss` keeps KL in the reward, as `kl_in_reward` does here."""
    trl = pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0")
    batch, config = make_batch(spread=0.6), GRPOLossConfig("rloo", epsilon_low=0.2)
    trainer = SimpleNamespace(
        accelerator=Accelerator(),
        args=SimpleNamespace(),
        aux_loss_enabled=False,
        model=SimpleNamespace(training=True),
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        _get_per_token_logps_and_entropies=lambda *a, **k: (batch.logprobs, batch.entropy, None),
        _metrics={"train": defaultdict(list)},
    )
    blank = torch.zeros(batch.mask.shape, dtype=torch.int64)
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), blank),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_logps": (batch.old * batch.mask).sum(1),
    }

    theirs = trl.RLOOTrainer._compute_loss(trainer, SimpleNamespace(training=True), inputs)

    assert_same(batch, policy_loss(batch.inputs(), config).loss, theirs)
