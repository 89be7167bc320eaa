"""Our losses against Liger 0.8.5's GRPO loss, called on the same random batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo_fast.objective import GRPOLossConfig, policy_loss

MAX_LENGTH = 12

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


@pytest.mark.parametrize("loss_type", list(CONSTANTS))
def test_loss_and_gradient_are_ligers(loss_type: str, make_batch: Callable, assert_same: Callable) -> None:
    module = pytest.importorskip(
        "liger_kernel.chunked_loss.grpo_loss", reason="pip install --no-deps liger-kernel==0.8.5"
    )
    batch = make_batch()
    # A KL term makes Liger's luspo loss per token, and its mean then runs over padding too: left out there.
    config = GRPOLossConfig(
        loss_type,
        max_completion_length=MAX_LENGTH,
        **CONSTANTS[loss_type],
        beta=0.0 if loss_type == "luspo" else 0.04,
        use_bias_correction_kl=loss_type != "gspo",
    )

    theirs, _ = module.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        batch.logprobs,
        batch.mask.double(),
        batch.advantages,
        batch.mask.double(),
        ref_per_token_logps=batch.ref,
        old_per_token_logps=batch.old,
        epsilon_low=config.epsilon_low,
        epsilon_high=config.epsilon_high,
        beta=config.beta,
        loss_type="grpo" if loss_type == "gspo" else loss_type,
        max_completion_length=MAX_LENGTH,
        importance_sampling_level="sequence" if loss_type in ("gspo", "luspo") else "token",
        sapo_temperature_neg=config.sapo_temperature_neg,
        delta=config.delta,
        use_bias_correction_kl=config.use_bias_correction_kl,
    )

    assert_same(batch, policy_loss(batch.inputs(), config).loss, theirs, rtol=1e-6)
