"""prime-rl 0.8: our policy losses by import path, and our head under its fused output layer.

`trainer.loss.import_path = "grpo_fast.integrations.prime_rl.policy_loss"`, its `kwargs` the fields of
`GRPOLossConfig`; `patch()` in the trainer process, for instance at the top of a module of your own that the
import path leads to.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.integrations.head_tap import logprob_and_entropy
from grpo_fast.integrations.host import Replacements, require
from grpo_fast.objective import GRPOLossConfig, LossInputs, StepTotals
from grpo_fast.objective import policy_loss as _policy_loss

if TYPE_CHECKING:
    from prime_rl.trainer.rl.loss import LossInputs as HostInputs
    from prime_rl.trainer.rl.loss import LossOutputs as HostOutputs

KNOWN_VERSIONS = ("0.8",)

_patch = Replacements()


def policy_loss(inputs: HostInputs, **config: Any) -> HostOutputs:
    """A loss of our catalogue for one sample of prime-rl, as a sum over its tokens.

    π_old is what the sampler reported: prime-rl has no other old policy. `loss_weights` multiply each token's
    term.

    Args:
        inputs: prime-rl's `LossInputs`, every tensor (seq,).
        config: the fields of `GRPOLossConfig`.

    Raises:
        ImportError: prime-rl is missing, or of a version this adapter does not know.
        ValueError: the loss cannot be had from what prime-rl hands over: it averages over sequences, needs
            the entropy, or a correction from π_old to the sampler.
    """
    outputs = _host_outputs()
    loss = _checked(tuple(sorted(config.items())))
    if loss.beta and inputs.loss_weights is not None:
        raise ValueError(
            f"beta = {loss.beta} beside per-token loss_weights: only the policy term can be weighted; set "
            "beta = 0"
        )
    tokens = inputs.trainer_logprobs.shape[0]
    result = _policy_loss(
        LossInputs(
            logprobs=inputs.trainer_logprobs,
            advantages=inputs.advantages,
            sequence_ids=torch.zeros(tokens, dtype=torch.int64, device=inputs.trainer_logprobs.device),
            loss_mask=inputs.loss_mask,
            num_sequences=1,
            old_logprobs=inputs.inference_logprobs,
            ref_logprobs=inputs.ref_logprobs,
            # One token and one sequence: a sum, which prime-rl divides by the step's tokens.
            totals=StepTotals(num_tokens=1, num_sequences=1),
            policy_weights=inputs.loss_weights,
        ),
        loss,
    )
    live = inputs.loss_mask.sum().clamp(min=1)
    metrics = {
        name: value if name.endswith(("_min", "_max")) else value / live
        for name, value in result.metrics.items()
    }
    return outputs(loss=result.loss, metrics=metrics)


@functools.cache
def _host_outputs() -> type[HostOutputs]:
    require("prime_rl", "prime-rl", KNOWN_VERSIONS)
    from prime_rl.trainer.rl.loss import LossOutputs

    return LossOutputs


@functools.cache
def _checked(options: tuple[tuple[str, Any], ...]) -> GRPOLossConfig:
    config = GRPOLossConfig(**dict(options))
    if not config.is_custom and config.facts.aggregation != "token_mean":
        raise ValueError(
            f"loss_type = {config.loss_type!r} averages over sequences, but prime-rl divides a sum "
            "by the step's tokens; use 'dapo', with importance_sampling_level = 'sequence' for a ratio of "
            "sequences"
        )
    if config.needs_sampler or config.needs_entropy:
        raise ValueError(
            "config needs the entropy or a separate old policy, which prime-rl does not hand to a loss; "
            "leave sampler_correction, entropy_coef, use_adaptive_entropy and top_entropy_quantile at their "
            "defaults"
        )
    return config


def patch() -> None:
    """Compute prime-rl's fused output layers, Gemma's softcapped one too, by `linear_logprob`. Idempotent.

    Raises:
        ImportError: prime-rl is missing, or of a version this adapter does not know.
    """
    if _patch:
        return
    require("prime_rl", "prime-rl", KNOWN_VERSIONS)
    from prime_rl.trainer.models.layers.lm_head import FusedOutputLinear
    from prime_rl.trainer.models.layers.lm_head_gemma import GemmaFusedOutputLinear

    for layer in (FusedOutputLinear, GemmaFusedOutputLinear):
        _patch.replace(layer, "forward", _output_layer_forward)


def unpatch() -> None:
    """Undo `patch`."""
    _patch.undo()


def _output_layer_forward(
    self: Any, hidden_states: Tensor, labels: Tensor | None = None, temperature: Tensor | None = None
) -> dict[str, Tensor]:
    """prime-rl's `FusedOutputLinear.forward`: (b, s, h), labels and temperatures (b, s)."""
    assert labels is not None, f"{type(self).__name__} requires labels: give the tokens to predict"
    assert temperature is not None, f"{type(self).__name__} requires temperatures of the labels' shape"
    options = {"temperature": temperature.expand(labels.shape), "softcap": getattr(self, "softcap", None)}
    logprobs, entropy = logprob_and_entropy(hidden_states, self.weight, labels, **options)
    return {"logprobs": logprobs, "entropy": entropy}
