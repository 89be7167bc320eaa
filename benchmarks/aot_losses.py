"""The policy loss launches that `benchmarks.aot` compiles: every surrogate, plain to all options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

_TOKENS, _SEQUENCES = 16_384, 64

_LOSSES: dict[str, dict[str, object]] = {
    "dapo": {"loss_type": "dapo"},
    "grpo with everything": {
        "loss_type": "grpo",
        "delta": 5.0,
        "beta": 0.04,
        "use_bias_correction_kl": True,
        "entropy_coef": 0.01,
        "sampler_correction": "geometric_mask",
        "off_policy_mask_threshold": 1.0,
    },
    "gspo": {"loss_type": "gspo", "beta": 0.04, "sampler_correction": "token_truncate"},
    "cispo": {"loss_type": "cispo", "beta": 0.04, "kl_estimator": "k2"},
    "sapo": {"loss_type": "sapo", "beta": 0.04, "kl_estimator": "k1"},
    "dppo_tv": {"loss_type": "dppo_tv"},
    "dppo_kl": {"loss_type": "dppo_kl"},
}


def policy_loss_cases() -> dict[str, Callable[[], None]]:
    """Name of the case to the call that launches its kernels."""
    return {f"policy loss, {name}": partial(_policy_loss, options) for name, options in _LOSSES.items()}


def _policy_loss(options: dict[str, object]) -> None:
    from grpo_fast.kernels.policy_loss import policy_loss

    from grpo_fast.head.fused_loss import loss_constants
    from grpo_fast.objective import GRPOLossConfig

    config = GRPOLossConfig(**options)
    policy_loss(
        _tokens(),
        _tokens(),
        _tokens(torch.int64),
        _tokens(torch.bool),
        _tokens(),
        _tokens() if config.needs_reference else None,
        _tokens() if config.needs_sampler else None,
        _tokens(),
        _SEQUENCES,
        loss_constants(config, None),
    )


def _tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(_TOKENS, dtype=dtype, device="meta")
