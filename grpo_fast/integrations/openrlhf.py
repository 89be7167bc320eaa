"""OpenRLHF 0.11: its `Actor`'s log-probabilities and entropies without logits, and our policy loss.

OpenRLHF works in Ray processes, so `patch` has to run in each. Ray does that when it is started with
`ray.init(runtime_env={"worker_process_setup_hook": "grpo_fast.integrations.openrlhf.patch"})`, which OpenRLHF
leaves as it is when `train_ppo_ray` follows in the same process.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from grpo_fast.head import HeadOutput, HeadParameters, linear_logprob
from grpo_fast.integrations.head_tap import HeadTap, tapped_head
from grpo_fast.integrations.host import padded_local_loss, require, require_config
from grpo_fast.objective import GRPOLossConfig, StepTotals

KNOWN_VERSIONS = ("0.11",)

_originals: dict[str, Any] = {}
_running: list[_Forward] = []


def patch(loss: GRPOLossConfig | None = None) -> None:
    """Put our head under OpenRLHF's actor. Idempotent for the head; a new `loss` replaces the last.

    Args:
        loss: what `PolicyLoss` computes from now on, whatever its own arguments say; None leaves
            OpenRLHF's loss alone. Its KL and entropy terms are OpenRLHF's in either case.

    Raises:
        ImportError: OpenRLHF is missing, or of a version this adapter does not know.
        TypeError: the loss is no configuration.
        ValueError: the loss has terms that OpenRLHF adds itself, or is not of the catalogue.
    """
    if loss is not None:
        _check(loss)
    require("openrlhf", "openrlhf", KNOWN_VERSIONS)
    from openrlhf.models import actor
    from openrlhf.models.loss import PolicyLoss

    if not _originals:
        for name in ("unpad_and_slice_tensor", "compute_entropy", "log_probs_from_logits"):
            _originals[name] = getattr(actor, name)
        _originals["forward"] = actor.Actor.forward
        _originals["loss"] = PolicyLoss.forward
        actor.Actor.forward = _actor_forward(actor.Actor.forward)
        actor.unpad_and_slice_tensor = _unpad_and_slice_tensor
        actor.compute_entropy = _compute_entropy
        actor.log_probs_from_logits = _log_probs_from_logits
    PolicyLoss.forward = _originals["loss"] if loss is None else _policy_loss_forward(loss)


def unpatch() -> None:
    """Undo `patch`."""
    if not _originals:
        return
    from openrlhf.models import actor
    from openrlhf.models.loss import PolicyLoss

    PolicyLoss.forward = _originals.pop("loss")
    actor.Actor.forward = _originals.pop("forward")
    for name in list(_originals):
        setattr(actor, name, _originals.pop(name))


class _Forward:
    """One forward of an actor: which token each position is to predict, and what the head said of it."""

    def __init__(self, actor: Any, labels: Tensor | None) -> None:
        self.labels = labels  # (B, T), or (1, total) once packed
        self.temperature = actor.temperature
        self.tap: HeadTap | None = None

    def head(self, hidden: Tensor, head: HeadParameters, entropy: bool) -> tuple[Tensor, Tensor | None]:
        out: HeadOutput = linear_logprob(
            hidden,
            head.weight,
            self.labels,
            temperature=self.temperature,
            outputs=("logprob", "entropy") if entropy else ("logprob",),
            **head.options,
        )
        return out.logprob, out.entropy


def _actor_forward(original: Any) -> Any:
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
        if action_mask is None and not return_logprobs:  # the caller wants the logits themselves
            return original(self, sequences, action_mask, *args, **options)
        run = _Forward(self, None if self.packing_samples else torch.roll(sequences, shifts=-1, dims=1))
        model = _unwrapped(self.model)
        with tapped_head(model, functools.partial(run.head, entropy=return_entropy)) as run.tap:
            _running.append(run)
            try:
                return original(self, sequences, action_mask, *args, **options)
            finally:
                _running.pop()

    return forward


def _unpad_and_slice_tensor(*args: Any) -> tuple[Any, ...]:
    result = _originals["unpad_and_slice_tensor"](*args)
    if _running:
        _running[-1].labels = result[2]
    return result


def _compute_entropy(logits: Tensor) -> Tensor:
    return _running[-1].tap.result[1] if _running else _originals["compute_entropy"](logits)


def _log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    if _running:
        return _running[-1].tap.result[0]
    return _originals["log_probs_from_logits"](logits, labels, temperature)


def _unwrapped(model: Any) -> Any:
    """The transformers model inside DeepSpeed's engine and PEFT's wrapper."""
    model = getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check(loss: GRPOLossConfig) -> None:
    require_config(loss)
    if loss.is_custom:
        raise ValueError(
            f"loss_type = {loss.loss_type!r} is a function of your own, whose normaliser is unknown; choose "
            "a catalogued loss"
        )
    if loss.beta or loss.needs_entropy:
        raise ValueError(
            "loss has a KL or entropy term; leave beta, entropy_coef, use_adaptive_entropy and "
            "top_entropy_quantile at their defaults and set OpenRLHF's own options"
        )


def _share_outside(config: GRPOLossConfig, log_ratio: Tensor, metrics: dict[str, Tensor]) -> Tensor | None:
    """Share of tokens that the sampler correction rejects or bounds; None where there is no such count."""
    if config.sampler_correction.endswith("_mask"):
        return metrics["sampling/rejected_mean"]
    if config.sampler_correction != "token_truncate":
        return None
    ratio = log_ratio.detach().exp()
    return (ratio != ratio.clamp(config.sampler_clip_min, config.sampler_clip_max)).float().mean()


def _policy_loss_forward(config: GRPOLossConfig) -> Any:
    def forward(
        self: Any,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """OpenRLHF's `PolicyLoss.forward`: loss, share clipped, KL to the old policy and to the sampler,
        share that the sampler correction left out.
        """
        mask = torch.ones_like(log_probs) if action_mask is None else action_mask
        totals = None
        if batch_num_tokens is not None or global_batch_size is not None:
            totals = StepTotals(float(batch_num_tokens or 1), float(global_batch_size or 1))
        result = padded_local_loss(
            config,
            mask,
            totals,
            logprobs=log_probs,
            old_logprobs=old_log_probs,
            advantages=advantages,
            sampler_logprobs=rollout_log_probs,
        )
        live = mask != 0
        metrics, none = result.metrics, torch.zeros((), device=log_probs.device)
        clipped = metrics.get("clip_ratio/region_mean", metrics.get("clip_ratio/high_mean", none))
        sampler_kl = rejected = None
        if rollout_log_probs is not None and config.needs_sampler:
            sampler_kl = (rollout_log_probs - old_log_probs)[live].mean()
            rejected = _share_outside(config, (old_log_probs - rollout_log_probs)[live], metrics)
        policy_kl = (old_log_probs - log_probs.detach())[live].mean()
        return result.loss * (1 if totals is None else dp_size), clipped, policy_kl, sampler_kl, rejected

    return forward
