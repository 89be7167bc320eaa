"""Compute our policy losses from a host's settings and its padded (B, T) tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast.objective import GRPOLossConfig, LossInputs, LossOutputs, StepTotals, policy_loss
from grpo_fast.objective.catalog import CATALOG, loss_specific

# The losses of TRL and Liger, and the fields of `GRPOLossConfig` that have the same name in both.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LOSS_CONSTANTS = loss_specific(LOSS_TYPES)
# The losses that both divide by the tokens of the whole step. bnpo divides by the micro-batch's.
TOKEN_MEANS = ("cispo", "dapo", "vespo")
_TERMS = {
    "reference": ("a reference model's log-probabilities", "beta"),
    "entropy": ("entropies", "entropy_coef, use_adaptive_entropy and top_entropy_quantile"),
    "sampler": ("a sampler's log-probabilities next to the old policy's", "sampler_correction"),
}


def require_loss(config: Any, host: str, *absent: str) -> None:
    """Raise where a host does not pass what a loss needs.

    Args:
        absent: what the host does not pass to a loss: "reference", "entropy", "sampler".

    Raises:
        TypeError: `config` is not a configuration, but for instance the name of a loss.
        ValueError: the loss needs what is absent.
    """
    if not isinstance(config, GRPOLossConfig):
        raise TypeError(f"the loss must be a GRPOLossConfig, such as GRPOLossConfig('gspo'), got {config!r}")
    for name in absent:
        if getattr(config, f"needs_{name}"):
            what, fields = _TERMS[name]
            raise ValueError(
                f"the loss needs {what}, which {host} does not pass to a loss; leave {fields} at the "
                f"default, and use {host}'s own option where it has one"
            )


def shared_config(
    loss_type: str, level: Any, max_completion_length: int | None, constants: dict[str, Any], **options: Any
) -> GRPOLossConfig:
    """Make the configuration of one of `LOSS_TYPES` from the settings that TRL and Liger share.

    Args:
        level: of the importance ratio, "token" or "sequence".
        constants: all of `LOSS_CONSTANTS`, of which each loss takes some.
        options: other fields of `GRPOLossConfig`.

    Raises:
        ValueError: an unknown loss, or a combination that we do not compute.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type = {loss_type!r} is unknown; choose one of {', '.join(LOSS_TYPES)}")
    if (loss_type, level) == ("luspo", "token"):
        # The sum over a sequence, averaged over sequences, is Dr. GRPO's with a constant length of one.
        loss_type, max_completion_length = "dr_grpo", 1
    return GRPOLossConfig(
        loss_type,
        importance_sampling_level=level,
        max_completion_length=max_completion_length,
        **{name: value for name, value in constants.items() if name in CATALOG[loss_type].fields},
        **options,
    )


def padded_policy_loss(
    config: GRPOLossConfig, mask: Tensor, totals: StepTotals, **tensors: Tensor | None
) -> LossOutputs:
    """Compute our policy loss of a host's padded micro-batch.

    Args:
        mask: (B, T) of any dtype, nonzero where a token counts. Other entries are never read.
        totals: counts over the optimizer step.
        tensors: fields of `LossInputs` by name, each (B, T), (B, 1) or (B,).
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    flat: dict[str, Any] = {name: _per_token(tensor, mask).flatten() for name, tensor in given.items()}
    inputs = LossInputs(
        sequence_ids=torch.arange(len(mask), device=mask.device).repeat_interleave(mask.shape[1]),
        loss_mask=(mask != 0).flatten(),
        num_sequences=len(mask),
        totals=totals,
        **flat,
    )
    return policy_loss(inputs, config)


def averaged_metrics(result: LossOutputs) -> tuple[dict[str, float], float]:
    """Return the metrics, for hosts that average them over micro-batches, and the share that was clipped.

    Minima and maxima are left out.
    """
    found = {key: value.item() for key, value in result.metrics.items() if not key.endswith(("_min", "_max"))}
    return found, found.get("clip_ratio/region_mean", found.get("clip_ratio/high_mean", 0.0))


def local_totals(mask: Tensor, num_tokens: float | None, num_sequences: float | None) -> StepTotals:
    """Return counts of the step for the loss, and of this micro-batch for metrics, which the host averages.

    Args:
        mask: (B, T), nonzero where a token counts.
        num_tokens, num_sequences: of the step. None: those of this micro-batch that count.
    """
    live = mask != 0
    tokens, sequences = float(live.sum()), float(live.any(dim=-1).sum())
    return StepTotals(
        tokens if num_tokens is None else float(num_tokens),
        sequences if num_sequences is None else float(num_sequences),
        measured_tokens=tokens,
        measured_sequences=sequences,
    )


def live_values(values: Tensor, live: Tensor) -> Tensor:
    """Return one value per live token, row by row: (B,), (B, 1) or (B, T) -> (N,). Differentiable."""
    return _per_token(values, live)[live]


def _per_token(values: Tensor, mask: Tensor) -> Tensor:
    return (values[:, None] if values.dim() == 1 else values).expand(mask.shape)
