"""Policy losses that one kernel computes with their gradient; autograd handles the others.

Loss, metrics and their names are those of `objective.policy_loss`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grpo_fast.head.call import schema_of
from grpo_fast.kernels.policy_facts import RESULTS, LossConstants, PolicyBatch
from grpo_fast.objective import GRPOLossConfig, LossInputs, StepTotals
from grpo_fast.objective.metrics import RATIO_BAND
from grpo_fast.objective.types import TOKEN_COLUMNS, LossOutputs, present

_UNKNOWN = -1.0


def fuses(inputs: LossInputs, config: GRPOLossConfig) -> bool:
    """Return whether the kernel computes this loss, and all of its inputs are given."""
    if config.is_custom or config.facts.fused is None or config.kl_kind == "exact":
        return False
    unread = TOKEN_COLUMNS.keys() - {*PolicyBatch._fields, "group_ids"}
    plain = config.top_entropy_quantile == 1 and all(getattr(inputs, name) is None for name in unread)
    length_known = config.aggregation_kind != "constant_length" or config.max_completion_length is not None
    given = (
        (inputs.ref_logprobs is not None or not config.needs_reference or config.kl_in_reward)
        and (inputs.entropy is not None or not config.needs_entropy)
        and (inputs.sampler_logprobs is not None or not config.needs_sampler)
    )
    filled = inputs.logprobs.numel() > 0 and inputs.num_sequences > 0
    float32 = inputs.logprobs.dtype == torch.float32
    return plain and length_known and given and filled and float32


def fused_policy_loss(
    inputs: LossInputs, config: GRPOLossConfig, entropy_coef: float | None = None
) -> LossOutputs:
    """Compute `policy_loss` of inputs that `fuses` accepts; differentiable once in logprobs and entropy."""
    batch = PolicyBatch(*(getattr(inputs, name) for name in PolicyBatch._fields))
    total, result, _, _ = _policy_loss(*batch, *loss_constants(config, inputs.totals, entropy_coef))
    return LossOutputs(total, _metrics(result, inputs, config))


def loss_constants(
    config: GRPOLossConfig, totals: StepTotals | None, entropy_coef: float | None = None
) -> LossConstants:
    """Return the kernel's constants of a loss that it has a branch for."""
    low, high, cap = present(config.facts.fused)(config)
    level, _, action = (config.sampler_correction or "none").partition("_")

    def of_step(name: str) -> float:
        return float(_or(getattr(totals, name, None), _UNKNOWN))

    in_loss = not config.kl_in_reward
    return LossConstants(
        config.facts.surrogate, config.ratio_level, config.aggregation_kind, low, high, cap,
        kl=config.kl_kind, beta=config.beta if in_loss else 0.0, correct_kl=config.use_bias_correction_kl,
        entropy_coef=_or(entropy_coef, config.entropy_coef),
        correction_level=level, correction_masks=action == "mask",
        correction_min=_or(config.sampler_clip_min, -math.inf),
        correction_max=_or(config.sampler_clip_max, math.inf),
        drift_max=_or(config.off_policy_mask_threshold, math.inf), ratio_band=RATIO_BAND,
        num_tokens=of_step("num_tokens"), num_sequences=of_step("num_sequences"),
        measured_tokens=of_step("measured_tokens"), measured_sequences=of_step("measured_sequences"),
        max_completion_length=float(_or(config.max_completion_length, 1)),
    )  # fmt: skip


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _metrics(result: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> dict[str, Tensor]:
    """Return the results that are metrics of this loss."""
    cuts = {cut for cut in config.facts.cuts if cut != "delta" or config.delta is not None}
    cuts |= {"region"} if "low" in cuts else set()
    optional = {"entropy": inputs.entropy, "kl": inputs.ref_logprobs, "sampling/": inputs.sampler_logprobs}
    absent = ["loss", *(name for name, given in optional.items() if given is None)]
    absent += [f"clip_ratio/{cut}" for cut in ("low", "high", "delta", "region") if cut not in cuts]
    found = dict(zip(RESULTS, result.unbind(), strict=True))
    return {name: value for name, value in found.items() if not name.startswith(tuple(absent))}


_ARGUMENTS = f"{schema_of(PolicyBatch)}, {schema_of(LossConstants, 'c_')}"


@torch.library.custom_op(
    "grpo_fast::policy_loss",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _policy_loss(*arguments: Any) -> tuple[Tensor, ...]:
    from grpo_fast.kernels.policy_loss import policy_loss

    batch, loss = _call(arguments)
    given = {name: t.contiguous() for name, t in batch._asdict().items() if isinstance(t, Tensor)}
    with torch.cuda.device_of(batch.logprobs):
        return policy_loss(batch._replace(**given), loss)


@_policy_loss.register_fake
def _policy_loss_fake(*arguments: Any) -> tuple[Tensor, ...]:
    batch, loss = _call(arguments)
    logprobs, bonus = batch.logprobs, batch.entropy is not None and loss.entropy_coef != 0
    return (
        logprobs.new_empty(()),
        logprobs.new_empty(len(RESULTS)),
        logprobs.new_empty(logprobs.shape),
        logprobs.new_empty(logprobs.numel() if bonus else 0),
    )


def _call(arguments: tuple[Any, ...]) -> tuple[PolicyBatch, LossConstants]:
    of_batch = len(PolicyBatch._fields)
    return PolicyBatch(*arguments[:of_batch]), LossConstants(*arguments[of_batch:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, result, gradient, of_entropy = output
    ctx.save_for_backward(gradient, of_entropy)
    ctx.mark_non_differentiable(result, gradient, of_entropy)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("the policy loss has no second derivative: call backward without create_graph")
    gradient, of_entropy = (None if upstream is None else saved * upstream for saved in ctx.saved_tensors)
    bonus = of_entropy if of_entropy is not None and of_entropy.numel() else None
    found = {"logprobs": gradient, "entropy": bonus}
    names = (*PolicyBatch._fields, *(f"c_{name}" for name in LossConstants._fields))
    return tuple(found.get(name) for name in names)


_policy_loss.register_autograd(_backward, setup_context=_setup_context)
