"""The policy losses that one kernel computes with their gradient; the others go through autograd.

`fuses` says which. The result is `objective.policy_loss`'s: same loss, same metrics under the same names.
"""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import torch
from torch import Tensor

from grpo_fast.kernels.policy_facts import RESULTS, PolicyLoss
from grpo_fast.objective import GRPOLossConfig, LossInputs, StepTotals
from grpo_fast.objective.metrics import RATIO_BAND
from grpo_fast.objective.types import LossOutputs

_CUTS = {
    "clip": ("low", "high", "delta"),
    "cispo": ("high",),
    "sapo": (),
    "reinforce": (),
    "dppo_tv": ("low", "high"),
    "dppo_kl": ("low", "high"),
}
"""The surrogates that the kernel knows, and where each cuts a ratio."""

_UNKNOWN = -1.0

_TOKENS = (
    *("logprobs", "advantages", "sequence_ids", "loss_mask"),
    *("old_logprobs", "ref_logprobs", "sampler_logprobs", "entropy"),
)
_ARGUMENTS = (
    *(f"Tensor{'?' * (place > 3)} {name}" for place, name in enumerate(_TOKENS)),
    "int sequences",
    *(f"{kind.__name__} {name}" for name, kind in get_type_hints(PolicyLoss).items()),
)


def fuses(inputs: LossInputs, config: GRPOLossConfig) -> bool:
    """Whether the kernel computes this loss of these inputs; where an input is missing, it does not."""
    if config.is_custom or config.facts.surrogate not in _CUTS:
        return False
    plain = config.top_entropy_quantile == 1 and inputs.policy_weights is None
    length_known = config.aggregation_kind != "constant_length" or config.max_completion_length is not None
    given = (
        (inputs.ref_logprobs is not None or not config.needs_reference or config.kl_in_reward)
        and (inputs.entropy is not None or not config.needs_entropy)
        and (inputs.sampler_logprobs is not None or not config.needs_sampler)
    )
    constants = [getattr(inputs, name) for name in _TOKENS[1:-1]]
    differentiable = any(tensor is not None and tensor.requires_grad for tensor in constants)
    filled = inputs.logprobs.numel() > 0 and inputs.num_sequences > 0
    float32 = inputs.logprobs.dtype == torch.float32
    return plain and length_known and given and not differentiable and filled and float32


def fused_policy_loss(inputs: LossInputs, config: GRPOLossConfig) -> LossOutputs:
    """`policy_loss` of inputs that `fuses`, differentiable once in the log-probabilities and the entropy."""
    loss = loss_constants(config, inputs.totals)
    tensors = (getattr(inputs, name) for name in _TOKENS)
    total, result, _, _ = _policy_loss(*tensors, inputs.num_sequences, *loss)
    return LossOutputs(total, _metrics(result, inputs, config))


def loss_constants(config: GRPOLossConfig, totals: StepTotals | None) -> PolicyLoss:
    surrogate = config.facts.surrogate
    low, high, cap = _bounds(surrogate, config)
    level, _, action = (config.sampler_correction or "none").partition("_")

    def of_step(name: str) -> float:
        return float(_or(getattr(totals, name, None), _UNKNOWN))

    in_loss = not config.kl_in_reward
    return PolicyLoss(
        surrogate, config.ratio_level, config.aggregation_kind, low, high, cap,
        kl=config.kl_kind, beta=config.beta if in_loss else 0.0, correct_kl=config.use_bias_correction_kl,
        entropy_coef=config.entropy_coef, correction_level=level, correction_masks=action == "mask",
        correction_min=_or(config.sampler_clip_min, -math.inf),
        correction_max=_or(config.sampler_clip_max, math.inf),
        drift_max=_or(config.off_policy_mask_threshold, math.inf), ratio_band=RATIO_BAND,
        num_tokens=of_step("num_tokens"), num_sequences=of_step("num_sequences"),
        measured_tokens=of_step("measured_tokens"), measured_sequences=of_step("measured_sequences"),
        max_completion_length=float(_or(config.max_completion_length, 1)),
    )  # fmt: skip


def _bounds(surrogate: str, config: GRPOLossConfig) -> tuple[float, float, float]:
    """`PolicyLoss.low`, `.high` and `.cap`."""
    low, high = _or(config.epsilon_low, 0.0), _or(config.epsilon_high, 0.0)
    if surrogate == "clip":
        cap = math.inf if config.delta is None else math.log(config.delta)
        return math.log1p(-low) if low < 1 else -math.inf, math.log1p(high), cap
    if surrogate == "sapo":
        return config.sapo_temperature_neg, config.sapo_temperature_pos, 0.0
    return low, high, config.dppo_ratio_max


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _metrics(result: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> dict[str, Tensor]:
    """Views of the kernel's results, of what the loss has."""
    cuts = [cut for cut in _CUTS[config.facts.surrogate] if cut != "delta" or config.delta is not None]
    has = {f"clip_ratio/{cut}" for cut in cuts} | {"policy"}
    if "low" in cuts:
        has.add("clip_ratio/region")
    optional = {"entropy": inputs.entropy, "kl": inputs.ref_logprobs, "sampling": inputs.sampler_logprobs}
    has |= {name for name, given in optional.items() if given is not None}

    def kind(name: str) -> str:
        return name.partition("_m")[0] if name.startswith("clip_ratio") else name.partition("/")[0]

    return {name: value for name, value in zip(RESULTS, result.unbind(), strict=True) if kind(name) in has}


@torch.library.custom_op(
    "grpo_fast::policy_loss",
    mutates_args=(),
    schema=f"({', '.join(_ARGUMENTS)}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _policy_loss(*arguments: Any) -> tuple[Tensor, ...]:
    from grpo_fast.kernels.policy_loss import policy_loss

    *tensors, sequences = arguments[: len(_TOKENS) + 1]
    given = (None if tensor is None else tensor.contiguous() for tensor in tensors)
    with torch.cuda.device_of(tensors[0]):
        return policy_loss(*given, sequences, PolicyLoss(*arguments[len(_TOKENS) + 1 :]))


@_policy_loss.register_fake
def _policy_loss_fake(logprobs: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    entropy, _, *constants = arguments[len(_TOKENS) - 2 :]
    bonus = entropy is not None and PolicyLoss(*constants).entropy_coef != 0
    return (
        logprobs.new_empty(()),
        logprobs.new_empty(len(RESULTS)),
        logprobs.new_empty(logprobs.shape),
        logprobs.new_empty(logprobs.numel() if bonus else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, result, gradient, of_entropy = output
    ctx.save_for_backward(gradient, of_entropy)
    ctx.mark_non_differentiable(result, gradient, of_entropy)
    ctx.set_materialize_grads(False)
    ctx.constants = len(inputs) - len(_TOKENS)


def _backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("the policy loss has no second derivative: call backward without create_graph")
    gradient, of_entropy = (None if upstream is None else saved * upstream for saved in ctx.saved_tensors)
    bonus = of_entropy if of_entropy is not None and of_entropy.numel() else None
    between = (None,) * (len(_TOKENS) - 2)
    return gradient, *between, bonus, *(None,) * ctx.constants


_policy_loss.register_autograd(_backward, setup_context=_setup_context)
