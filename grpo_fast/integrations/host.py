"""What adapters to other trainers share: a host of a known version, and our loss of its padded batch."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import ModuleType

import torch
from torch import Tensor

from grpo_fast.integrations.padded import Packing
from grpo_fast.objective import GRPOLossConfig, LossInputs, LossOutputs, StepTotals, policy_loss


def require(module: str, distribution: str, known: tuple[str, ...]) -> ModuleType:
    """Import a host library of a version this package was tested with.

    Args:
        module: what to import.
        distribution: the name it is installed under.
        known: version prefixes, such as "0.9".

    Raises:
        ImportError: the library is missing, or of another version.
    """
    try:
        host = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}); this adapter needs {distribution} {' or '.join(known)}"
        ) from error
    version = _version(host, distribution)
    if not any(version == prefix or version.startswith(f"{prefix}.") for prefix in known):
        raise ImportError(
            f"{distribution} is version {version}, but this adapter knows {' and '.join(known)} only; "
            f"install '{distribution}=={known[-1]}.*', or a newer grpo-fast"
        )
    return host


def _version(host: ModuleType, distribution: str) -> str:
    if isinstance(version := getattr(host, "__version__", None), str):
        return version
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            f"{distribution} is importable but not installed, so its version is unknown; install it with pip"
        ) from error


def require_config(config: GRPOLossConfig) -> None:
    """Raises TypeError for anything else, such as the bare name of a loss."""
    if not isinstance(config, GRPOLossConfig):
        raise TypeError(f"the loss must be a GRPOLossConfig, such as GRPOLossConfig('gspo'), got {config!r}")


def padded_policy_loss(
    config: GRPOLossConfig, mask: Tensor, totals: StepTotals | None, **tensors: Tensor | None
) -> LossOutputs:
    """Our policy loss of a host's padded micro-batch.

    Args:
        mask: (B, T) of any dtype, not zero where a token counts. Other entries are never read.
        totals: counts over the optimiser step; None: the live tokens, and the sequences that have any.
        tensors: fields of `LossInputs` by name, each (B, T), (B, 1) or (B,).
    """
    packing = Packing.of(mask)
    packed = {name: packing.spread(tensor) for name, tensor in tensors.items() if tensor is not None}
    return policy_loss(
        LossInputs(
            sequence_ids=packing.sequence_ids,
            loss_mask=torch.ones_like(packing.index, dtype=torch.bool),
            num_sequences=packing.num_sequences,
            totals=totals or own_totals(mask),
            **packed,
        ),
        config,
    )


def padded_local_loss(
    config: GRPOLossConfig, mask: Tensor, totals: StepTotals | None, **tensors: Tensor | None
) -> LossOutputs:
    """`padded_policy_loss`, but with metrics that are this micro-batch's own means, for hosts that average.

    Every weight of a catalogued loss is one over a count of the step, so the loss follows by a factor.
    """
    own = own_totals(mask)
    result = padded_policy_loss(config, mask, own, **tensors)
    if totals is None:
        return result
    if config.facts.aggregation == "token_mean":
        share = max(own.num_tokens, 1) / totals.num_tokens
    else:
        share = max(own.num_sequences, 1) / totals.num_sequences
    return LossOutputs(result.loss * share, result.metrics)


def own_totals(mask: Tensor) -> StepTotals:
    """The live tokens of a padded batch and the sequences that have any. Waits for the device."""
    live = mask != 0
    return StepTotals(num_tokens=float(live.sum()), num_sequences=float(live.any(dim=-1).sum()))
