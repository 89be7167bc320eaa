"""verl: our head in place of its fused kernels, and our policy losses by name.

Set `actor_rollout_ref.model.external_lib=grpo_fast.integrations.verl`: verl imports this module in every
worker, and the import patches verl. With `use_fused_kernels=True` both backends, `triton` and `torch`, then
run `linear_logprob`. `actor.policy_loss.loss_mode=grpo_fast_<name>` chooses one of our losses.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor

from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import Replacements, logprob_and_entropy, rebind
from grpo_fast.integrations.losses import averaged_metrics, local_totals, padded_policy_loss
from grpo_fast.objective import GRPOLossConfig
from grpo_fast.objective.catalog import CATALOG, LOSS_TYPES, Aggregation

PREFIX = "grpo_fast_"

_AGGREGATION: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant_length",
}
_KERNEL = "linear_cross_entropy"
_patch = Replacements()


def patch() -> None:
    """Replace verl's fused linear cross-entropy by our head, and register our losses. Idempotent."""
    losses = private("verl", "trainer.ppo.core_algos").POLICY_LOSS_REGISTRY
    fused = private("verl", "utils.experimental.torch_functional").FusedLinearForPPO
    kernel = private("verl", f"utils.kernel.{_KERNEL}")
    unpatch()
    theirs = getattr(kernel, _KERNEL)
    rebind("verl", theirs, fused_linear_cross_entropy)
    _patch.callback(rebind, "verl", fused_linear_cross_entropy, theirs)
    _patch.replace(fused, "forward", _fused_linear_for_ppo)
    for name in LOSS_TYPES:
        losses[PREFIX + name] = functools.partial(_policy_loss, name)
        _patch.callback(losses.pop, PREFIX + name, None)


unpatch = _patch.close


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies of flattened tokens, as verl's `linear_cross_entropy` does.

    Args:
        hidden: (..., H).
        weight: (V, H), or this rank's rows of it under `dist_process_group`.
        labels: (...) int64.
        reduction: of the log-probabilities: "none", "sum" or "mean".
        dist_process_group: tensor-parallel ranks. As with verl's kernel, the caller sums the gradients of
            `hidden` over them, as Megatron's sequence-parallel gather does.

    Returns:
        Log-probabilities (N,) or () float32, entropies (N,) float32.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    hidden = hidden.reshape(-1, hidden.shape[-1])
    group = dist_process_group if dist_process_group and dist.get_world_size(dist_process_group) > 1 else None
    if group is not None:
        hidden = hidden.view_as(hidden)  # leaves no hook on the caller's tensor
        if hidden.requires_grad:  # each rank returns a share of the gradient: the caller adds them up
            hidden.register_hook(lambda gradient: gradient / dist.get_world_size(group))
    options = {"temperature": temperature, "process_group": group}
    logprobs, entropy = logprob_and_entropy(hidden, weight, labels.reshape(-1), **options)
    return logprobs if reduction == "none" else getattr(logprobs, reduction)(), entropy


def loss_config(name: str, actor: Any, loss_agg_mode: str, response_length: int) -> GRPOLossConfig:
    """Return the loss `name` with the constants of verl's `ActorConfig` and verl's aggregation."""
    row = CATALOG[name]
    if loss_agg_mode not in _AGGREGATION:
        raise ValueError(
            f"loss_agg_mode = {loss_agg_mode!r} has no equivalent with loss_mode = '{PREFIX}{name}'; set "
            f"actor.loss_agg_mode to one of {', '.join(_AGGREGATION)}"
        )
    clip, low, high = actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high
    high = clip if high is None else high
    options = {
        "epsilon_low": clip if low is None else low,
        "epsilon_high": 1 + high if name == "cispo" else high,
        "sapo_temperature_pos": actor.tau_pos,
        "sapo_temperature_neg": actor.tau_neg,
        "clip_cov_ratio": actor.policy_loss.clip_cov_ratio,
        "clip_cov_low": actor.policy_loss.clip_cov_lb,
        "clip_cov_high": actor.policy_loss.clip_cov_ub,
        "kl_cov_ratio": actor.policy_loss.kl_cov_ratio,
        "kl_cov_coef": actor.policy_loss.ppo_kl_coef,
    }
    if row.choosable_levels[0] == "token":
        options["delta"] = actor.clip_ratio_c
    chosen = {field: value for field, value in options.items() if field in row.fields}
    if _AGGREGATION[loss_agg_mode] == "constant_length":
        chosen["max_completion_length"] = actor.loss_scale_factor or response_length
    return GRPOLossConfig(loss_type=name, aggregation=_AGGREGATION[loss_agg_mode], **chosen)


def _policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss `name` by verl's protocol of a policy loss."""
    info = config.global_batch_info
    tokens, sequences = info.get("batch_num_tokens"), info.get("global_batch_size")
    processes = info.get("dp_size", 1)
    if tokens is None and sequences is None and processes > 1:
        raise ValueError(
            "batch_num_tokens and global_batch_size are missing from config.global_batch_info, but "
            f"dp_size = {processes}; set them, or every rank would divide by its own counts"
        )
    result = padded_policy_loss(
        loss_config(name, config, loss_agg_mode, response_mask.shape[-1]),
        response_mask,
        local_totals(response_mask, tokens, sequences),
        logprobs=log_prob,
        advantages=advantages,
        old_logprobs=old_log_prob,
        policy_weights=rollout_is_weights,
    )
    live = response_mask != 0
    kl = (old_log_prob - log_prob.detach()).masked_fill(~live, 0).sum() / live.sum().clamp(min=1)
    found, clipped = averaged_metrics(result)
    return result.loss * processes, {f"actor/{key}": value for key, value in found.items()} | {
        "actor/ppo_kl": kl.item(),
        "actor/pg_clipfrac": clipped,
        "actor/pg_clipfrac_lower": found.get("clip_ratio/delta_mean", 0.0),
    }


def _fused_linear_for_ppo(
    self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Replace `FusedLinearForPPO.forward`; both results have the shape of `input_ids`."""
    return logprob_and_entropy(hidden_states, vocab_weights, input_ids.long(), temperature=temperature)


patch()
