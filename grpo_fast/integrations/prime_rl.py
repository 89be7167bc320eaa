"""prime-rl: our policy losses by import path, and our head under its fused output layer.

`trainer.loss.import_path = "grpo_fast.integrations.prime_rl.policy_loss"`, its `kwargs` the fields of
`GRPOLossConfig`; `patch()` in the trainer process, for instance at the top of a module of your own that the
import path leads to.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import Replacements, logprob_and_entropy
from grpo_fast.integrations.losses import local_totals, padded_policy_loss, require_loss
from grpo_fast.objective import GRPOLossConfig

_patch = Replacements()


def policy_loss(inputs: Any, **config: Any) -> Any:
    """A loss of our catalogue for one sample of prime-rl, as a sum over its tokens.

    π_old is what the sampler reported: prime-rl has no other old policy. `loss_weights` multiply each token's
    term.

    Args:
        inputs: prime-rl's `LossInputs`, every tensor (seq,).
        config: the fields of `GRPOLossConfig`.

    Returns:
        prime-rl's `LossOutputs`.

    Raises:
        ImportError, as `patch` does: prime-rl is missing, or of a version this adapter does not know.
        ValueError: the loss cannot be had from what prime-rl hands over: it averages over sequences, needs
            the entropy, or a correction from π_old to the sampler.
    """
    outputs, loss = _loss_outputs(), GRPOLossConfig(**config)
    require_loss(loss, "prime-rl", "entropy", "sampler")
    if not loss.is_custom and loss.aggregation_kind != "token_mean":
        raise ValueError(
            f"loss_type = {loss.loss_type!r} averages over sequences, but prime-rl divides a sum by the "
            "step's tokens; set aggregation = 'token_mean'"
        )
    if loss.beta and inputs.loss_weights is not None:
        raise ValueError(
            f"beta = {loss.beta} beside per-token loss_weights: only the policy term can be weighted; set "
            "beta = 0"
        )
    mask = inputs.loss_mask[None]
    tensors = {
        "logprobs": inputs.trainer_logprobs,
        "advantages": inputs.advantages,
        "old_logprobs": inputs.inference_logprobs,
        "ref_logprobs": inputs.ref_logprobs,
        "policy_weights": inputs.loss_weights,
    }
    rows = {name: tensor[None] for name, tensor in tensors.items() if tensor is not None}
    # One token and one sequence in the step: a sum, which prime-rl divides by the step's tokens.
    result = padded_policy_loss(loss, mask, local_totals(mask, 1, 1), **rows)
    return outputs(loss=result.loss, metrics=result.metrics)


@functools.cache
def _loss_outputs() -> Any:
    return private("prime_rl", "trainer.rl.loss").LossOutputs


def patch() -> None:
    """Compute prime-rl's fused output layers, Gemma's softcapped one too, by `linear_logprob`. Idempotent."""
    heads, gemmas = (private("prime_rl", f"trainer.models.layers.lm_head{end}") for end in ("", "_gemma"))
    unpatch()
    for layer in (heads.FusedOutputLinear, gemmas.GemmaFusedOutputLinear):
        _patch.replace(layer, "forward", _output_layer_forward)


unpatch = _patch.close


def _output_layer_forward(
    self: Any, hidden_states: Tensor, labels: Tensor | None = None, temperature: Tensor | None = None
) -> dict[str, Tensor]:
    """prime-rl's `FusedOutputLinear.forward`: (b, s, h), labels and temperatures (b, s)."""
    assert labels is not None, f"{type(self).__name__} requires labels: give the tokens to predict"
    assert temperature is not None, f"{type(self).__name__} requires temperatures of the labels' shape"
    options = {"temperature": temperature.expand(labels.shape), "softcap": getattr(self, "softcap", None)}
    logprobs, entropy = logprob_and_entropy(hidden_states, self.weight, labels, **options)
    return {"logprobs": logprobs, "entropy": entropy}
