"""OpenRLHF: log-probabilities and entropies of its `Actor` without logits, and our policy loss.

OpenRLHF works in Ray processes, so each of them must call `patch`. Before `train_ppo_ray` start Ray with
`ray.init(runtime_env={"worker_process_setup_hook": "grpo_fast.integrations.openrlhf.patch"})`.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import Replacements, entropy_of, logprob_of, scores_for_logits
from grpo_fast.integrations.losses import local_totals, padded_policy_loss, require_loss
from grpo_fast.objective import GRPOLossConfig

_patch = Replacements()


def patch(loss: GRPOLossConfig | None = None) -> None:
    """Replace the head of OpenRLHF's actor by ours. Calling it again replaces the loss.

    Args:
        loss: what `PolicyLoss` computes in place of its own loss. None: OpenRLHF's loss. KL and entropy
            terms are OpenRLHF's in either case.

    Raises:
        TypeError: the loss is not a configuration.
        ValueError: the loss has terms that OpenRLHF adds itself.
    """
    if loss is not None:
        require_loss(loss, "OpenRLHF", "reference", "entropy")
    actor, losses = private("openrlhf", "models.actor"), private("openrlhf", "models.loss")
    unpatch()
    _patch.replace(actor.Actor, "forward", _actor_forward(actor, actor.Actor.forward))
    if loss is not None:
        _patch.replace(losses.PolicyLoss, "forward", functools.partialmethod(_policy_loss, loss))


unpatch = _patch.close


def _actor_forward(actor: ModuleType, original: Any) -> Any:
    @functools.wraps(original)
    def forward(
        self: Any,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        *args: Any,
        return_logprobs: bool = False,
        return_entropy: bool = False,
        **kwargs: Any,
    ) -> Any:
        options = kwargs | {"return_logprobs": return_logprobs, "return_entropy": return_entropy}
        if action_mask is None and not return_logprobs:  # the caller wants logits
            return original(self, sequences, action_mask, *args, **options)
        labels: list[Tensor] = []  # (1, total) once packed
        unpad = actor.unpad_and_slice_tensor

        def unpad_and_slice_tensor(*tensors: Any) -> tuple[Any, ...]:
            result = unpad(*tensors)
            labels[:] = [result[2]]
            return result

        scores = scores_for_logits(
            self.model,
            self.temperature,
            entropy=return_entropy,
            entropy_grad=True,
            targets=lambda: labels[0] if labels else None,
        )
        with scores, Replacements() as replacements:
            replacements.replace(actor, "unpad_and_slice_tensor", unpad_and_slice_tensor)
            replacements.replace(actor, "log_probs_from_logits", logprob_of)
            replacements.replace(actor, "compute_entropy", entropy_of)
            return original(self, sequences, action_mask, *args, **options)

    return forward


def _policy_loss(
    self: Any,
    config: GRPOLossConfig,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    action_mask: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Replace `PolicyLoss.forward`.

    Returns:
        The loss, the share that was clipped, the KL to the old policy and to the sampler, and the share that
        the sampler correction changed.
    """
    mask = torch.ones_like(log_probs) if action_mask is None else action_mask
    result = padded_policy_loss(
        config,
        mask,
        local_totals(mask, batch_num_tokens, global_batch_size),
        logprobs=log_probs,
        old_logprobs=old_log_probs,
        advantages=advantages,
        sampler_logprobs=rollout_log_probs,
    )
    of_step = batch_num_tokens is not None or global_batch_size is not None
    live, metrics, none = mask != 0, result.metrics, log_probs.new_zeros(())
    clipped = metrics.get("clip_ratio/region_mean", metrics.get("clip_ratio/high_mean", none))
    sampler_kl = left_out = None
    if rollout_log_probs is not None and config.needs_sampler:
        log_ratio = (old_log_probs - rollout_log_probs)[live]
        sampler_kl, left_out = -log_ratio.mean(), metrics["sampling/rejected_mean"]
        if config.sampler_correction == "token_truncate":
            ratio = log_ratio.exp()
            left_out = (ratio != ratio.clamp(config.sampler_clip_min, config.sampler_clip_max)).float().mean()
    policy_kl = (old_log_probs - log_probs.detach())[live].mean()
    return result.loss * (dp_size if of_step else 1), clipped, policy_kl, sampler_kl, left_out
