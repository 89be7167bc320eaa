"""SkyRL: log-probabilities and entropies of its policy workers without logits, and our policy losses by name.

Import this module in your entry point before SkyRL starts Ray, and set
`trainer.algorithm.policy_loss_type=grpo_fast_<name>`. The import patches SkyRL. SkyRL sends the registered
losses to its workers, which import this module to load one. Megatron workers take the losses only.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import Replacements, entropy_of, logprob_of, scores_for_logits
from grpo_fast.integrations.losses import averaged_metrics, local_totals, padded_policy_loss
from grpo_fast.objective import GRPOLossConfig
from grpo_fast.objective.catalog import CATALOG

PREFIX = "grpo_fast_"
# SkyRL scales the advantages by the normalizer, so a loss must be proportional to them.
LOSS_TYPES = tuple(name for name in CATALOG if name not in ("clip_cov", "kl_cov"))

_patch = Replacements()


def patch() -> None:
    """Put our head under SkyRL's `HFModelWrapper`, and register our losses. Idempotent."""
    wrapper = private("skyrl", "backends.skyrl_train.workers.model_wrapper")
    losses = private("skyrl", "backends.skyrl_train.utils.ppo_utils")
    unpatch()
    model = wrapper.HFModelWrapper
    _patch.replace(model, "forward", _model_forward(wrapper, model.forward))
    for name in LOSS_TYPES:
        losses.PolicyLossRegistry.register(PREFIX + name, functools.partial(policy_loss, name))
        _patch.callback(losses.PolicyLossRegistry.unregister, PREFIX + name)


unpatch = _patch.close


def _model_forward(wrapper: ModuleType, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if given["enable_sample_support_replay"]:  # scores over a part of the vocabulary
            return original(self, *args, **kwargs)
        slices: list[Tensor] = []
        slice_inputs = wrapper.ulysses_pad_and_slice_inputs

        def keep_slices(*inputs: Any, **options: Any) -> Any:
            result = slice_inputs(*inputs, **options)
            slices.append(result[0])  # the tokens, then the tokens that they predict
            return result

        def entropy(scores: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
            return entropy_of(scores) if attention_mask is None else entropy_of(scores) * attention_mask

        scores = scores_for_logits(
            self.model,
            given["temperature"],
            entropy=given["compute_entropy"],
            entropy_grad=given["entropy_requires_grad"],
            targets=lambda: slices[-1] if slices else None,
        )
        with scores, Replacements() as replacements:
            replacements.replace(wrapper, "ulysses_pad_and_slice_inputs", keep_slices)
            replacements.replace(wrapper, "logprobs_from_logits", logprob_of)
            replacements.replace(self, "chunked_entropy_from_logits_fn", entropy)
            return original(self, *args, **kwargs)

    return forward


def loss_config(name: str, algorithm: Any) -> GRPOLossConfig:
    """Return the loss `name` with the constants of SkyRL's `AlgorithmConfig`."""
    low, high = algorithm.eps_clip_low, algorithm.eps_clip_high
    if name.startswith("dppo"):
        low, high = algorithm.dppo.delta_low, algorithm.dppo.delta_high
    options = {
        "epsilon_low": low,
        "epsilon_high": 1 + algorithm.cispo.cispo_eps_clip_high if name == "cispo" else high,
        "sapo_temperature_pos": algorithm.sapo.tau_pos,
        "sapo_temperature_neg": algorithm.sapo.tau_neg,
    }
    fields = CATALOG[name].fields
    return GRPOLossConfig(
        loss_type=name,
        aggregation="token_mean",
        **{field: value for field, value in options.items() if field in fields},
    )


def policy_loss(
    name: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss `name` by SkyRL's protocol of a policy loss.

    Args:
        log_probs, old_log_probs, rollout_logprobs: (B, T).
        advantages: (B, T), divided by the step's normalizer, so that the loss is a sum.
        config: SkyRL's `AlgorithmConfig`. Its `off_policy_correction` weighs and masks tokens as in SkyRL.
    """
    correct = private("skyrl", "backends.skyrl_train.utils.ppo_utils").apply_off_policy_correction
    mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
    weights, mask, corrections = correct(
        torch.ones_like(log_probs), old_log_probs, rollout_logprobs, mask, config.off_policy_correction
    )
    result = padded_policy_loss(
        loss_config(name, config),
        mask,
        local_totals(mask, 1, 1),
        logprobs=log_probs,
        old_logprobs=old_log_probs,
        advantages=advantages,
        policy_weights=weights,
    )
    found, clipped = averaged_metrics(result)
    return result.loss, corrections | found | {"clip_ratio": clipped}


patch()
