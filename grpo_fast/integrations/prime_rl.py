"""prime-rl: our policy losses by import path, and our head in its fused output layer.

Set `trainer.loss.import_path = "grpo_fast.integrations.prime_rl.policy_loss"`; its `kwargs` are the fields of
`GRPOLossConfig`. Call `patch()` in the trainer process, for instance in the module of a custom import path.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import Replacements, logprob_and_entropy
from grpo_fast.integrations.losses import local_totals, padded_policy_loss, require_loss
from grpo_fast.objective import GRPOLossConfig

_patch = Replacements()


def policy_loss(inputs: Any, **config: Any) -> Any:
    """Compute one of our losses for one sample, as a sum over its tokens.

    The old log-probabilities are the sampler's: prime-rl has no others. `loss_weights` multiply each token's
    term.

    Args:
        inputs: prime-rl's `LossInputs`, every tensor (seq,).
        config: the fields of `GRPOLossConfig`.

    Returns:
        prime-rl's `LossOutputs`.

    Raises:
        ValueError: the loss averages over sequences, or needs the entropy or a correction of the sampler,
            which prime-rl does not pass.
    """
    loss = GRPOLossConfig(**config)
    require_loss(loss, "prime-rl", "entropy", "sampler")
    if not loss.is_custom and loss.aggregation_kind != "token_mean":
        raise ValueError(
            f"loss_type = {loss.loss_type!r} averages over sequences, but prime-rl divides a sum by the "
            "step's tokens; set aggregation = 'token_mean'"
        )
    if loss.beta and inputs.loss_weights is not None:
        raise ValueError(
            f"beta = {loss.beta} with per-token loss_weights: only the policy term can be weighted; set "
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
    return private("prime_rl", "trainer.rl.loss").LossOutputs(loss=result.loss, metrics=result.metrics)


def patch() -> None:
    """Compute prime-rl's fused output layers, also Gemma's with a softcap, by our head. Idempotent."""
    heads, gemmas = (private("prime_rl", f"trainer.models.layers.lm_head{end}") for end in ("", "_gemma"))
    unpatch()
    for layer in (heads.FusedOutputLinear, gemmas.GemmaFusedOutputLinear):
        _patch.replace(layer, "forward", _output_layer_forward)


unpatch = _patch.close


def _output_layer_forward(
    self: Any, hidden_states: Tensor, labels: Tensor | None = None, temperature: Tensor | None = None
) -> dict[str, Tensor]:
    """Replace `FusedOutputLinear.forward`: hidden states (b, s, h), labels and temperatures (b, s)."""
    assert labels is not None, f"{type(self).__name__} requires labels: give the tokens to predict"
    assert temperature is not None, f"{type(self).__name__} requires temperatures of the labels' shape"
    options = {"temperature": temperature.expand(labels.shape), "softcap": getattr(self, "softcap", None)}
    logprobs, entropy = logprob_and_entropy(hidden_states, self.weight, labels, **options)
    return {"logprobs": logprobs, "entropy": entropy}
