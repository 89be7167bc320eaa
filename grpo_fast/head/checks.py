"""Check the arguments of the public functions, and turn them into a `HeadCall` or a `KLCall`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp import is_autocast_available
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from grpo_fast.head.call import (
    ROW_IGNORED,
    ROW_INVALID,
    HeadCall,
    KLCall,
    Shard,
    constant_when_compiled,
)
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.objective.types import FLOATS, INTEGERS, TOKEN_COLUMNS, refuse_gradients

IGNORE_INDEX = -100  # as torch's cross-entropy has it
OUTPUTS = ("logprob", "entropy", "logsumexp", "mean_logit", "argmax_is_target", "log_sum_sq_probs")

T = TypeVar("T")
_NOTHING: frozenset[str] = frozenset()
_MOST_PADDING, _MOST_PADDING_SHARE = 256, 0.05  # entries by which one vocabulary may be wider than the other

_NEEDED = ("targets", "advantages", "sequence_ids")
_REMOVED = {
    "deterministic": "was removed: every result is bit-equal from run to run; leave it out",
    "held_back": "was removed: clip_cov and kl_cov choose tokens within the batch; leave it out",
    "topk": "was removed: take (hidden @ weight.T).log_softmax(-1).topk(k) of the rows you inspect",
}
_TOKEN = "(N,), one value per token; broadcast values per sequence with values[sequence_ids]"
_TENSORS = {
    "hidden": (FLOATS, "(..., H), H as in weight"),
    "weight": (FLOATS, "(V, H)"),
    "targets": (INTEGERS, "of hidden's leading dimensions"),
    "bias": (FLOATS, "(V,) as in weight"),
    "weight_grad": (FLOATS, "(V, H) as weight"),
    "mask": ((torch.bool,), "True where a token counts, of hidden's leading dimensions"),
    "ref_hidden": (FLOATS, "(..., H'), the tokens of hidden and H' as in ref_weight"),
    "ref_weight": (FLOATS, "(V, H')"),
    **{name: (dtypes, _TOKEN) for name, dtypes in TOKEN_COLUMNS.items()},
}
"""Dtypes and shape of each tensor argument."""

_NUMBERS = {
    "beta": "in [0, 1]: 0 is the forward and 1 the reverse KL",
    "logit_scale": "a positive number",
    "softcap": "a positive number, or None for no cap",
    "temperature": "positive and finite",
    "tolerance": "0 (exact) or more, or None for the default",
    "entropy_coef": "at least 0, or None for the loss's",
    "label_smoothing": "in [0, 1]",
    "z_loss": "at least 0 and finite",
}


def head_call(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    wanted: Set[str],
    differentiable: Set[str],
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    tolerance: float | None = None,
    seed: int | None = None,
    weight_grad: Tensor | None = None,
    recompute: bool = True,
    process_group: ProcessGroup | None = None,
    **unknown: object,
) -> tuple[HeadCall, Shard | None]:
    """Flatten leading dimensions, choose the compute dtype, and mark ignored and invalid targets.

    Args:
        wanted: names of statistics, of `OUTPUTS`.
        differentiable: the names that may receive a gradient.

    Returns:
        The call; and this rank's shard with a process_group, which makes it a collective.
    """
    for name in unknown:
        raise TypeError(f"{name} {_REMOVED.get(name, 'is no argument of this function; see its `help`')}")
    _check_kind("process_group", process_group, ProcessGroup | None)
    _check_kind("ignore_index", ignore_index, int)
    _refuse_transforms(hidden=hidden, weight=weight, bias=bias, temperature=temperature)
    shard = None if process_group is None else Shard.of(weight, process_group)
    _check_operands(hidden, weight, targets, bias, weight_grad)
    check_numbers(positive=True, logit_scale=logit_scale)
    check_numbers(positive=True, optional=True, softcap=softcap)
    check_numbers(optional=True, tolerance=tolerance)
    if seed is not None and (isinstance(seed, bool) or not (isinstance(seed, int) and 0 <= seed < 2**63)):
        raise ValueError(f"seed must be an integer in [0, 2^63), or None for none, got {seed!r}")
    kind = compute_dtype(hidden, weight)
    flat = targets.reshape(-1).to(torch.int64)
    inside = (flat >= 0) & (flat < (weight.shape[0] if shard is None else shard.vocabulary))
    marked = torch.where(inside, flat, ROW_INVALID)
    call = HeadCall(
        hidden=hidden.reshape(-1, hidden.shape[-1]).to(kind),
        weight=weight.to(kind),
        targets=torch.where(flat == ignore_index, ROW_IGNORED, marked),
        bias=bias,
        inv_temperature=_inverse_temperature(temperature, targets, kind),
        logit_scale=float(logit_scale),
        softcap=None if softcap is None else float(softcap),
        entropy="entropy" in wanted,
        mean_logit="mean_logit" in wanted,
        max_logit="argmax_is_target" in wanted,
        log_sum_sq="log_sum_sq_probs" in wanted,
        # A frozen head's forward can prepare the gradient of the log-probability only.
        jacobian=differentiable <= {"logprob"},
        keep=not recompute,
        tolerance=tolerance,
        seed=seed,
        weight_grad=weight_grad,
    )
    return call, shard


def kl_call(
    hidden: Tensor,
    weight: Tensor,
    mask: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    direction: str = "reverse",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    ref_temperature: float | Tensor | None = None,
    ref_bias: Tensor | None = None,
    ref_logit_scale: float = 1.0,
    ref_softcap: float | None = None,
    topk: int | None = None,
    process_group: ProcessGroup | None = None,
    **student_options: Any,
) -> tuple[KLCall, Shard | None]:
    """Check both heads, over the entries that both vocabularies have; see `head_call`."""
    for name in student_options.keys() - {"bias", "logit_scale", "softcap", "tolerance", "seed"}:
        raise TypeError(f"{name} is no argument of this function; see its `help`")
    if direction not in (directions := ("reverse", "forward", "jsd")):
        raise ValueError(f"direction must be one of {directions}, got {direction!r}")
    check_numbers(most=1, beta=beta)
    _check("hidden", hidden)
    _check("mask", mask, hidden.shape[:-1], hidden.device)
    _check("ref_hidden", ref_hidden)
    _check("ref_hidden", ref_hidden, (*mask.shape, *ref_hidden.shape[-1:]), hidden.device)
    _check("ref_weight", ref_weight)
    if ref_hidden.requires_grad and torch.is_grad_enabled():
        raise ValueError("ref_hidden requires grad, but gets no gradient here: give ref_hidden.detach()")
    targets = torch.where(mask, 0, IGNORE_INDEX)
    student, shard = head_call(
        hidden, weight, targets, _NOTHING, _NOTHING, temperature=temperature, process_group=process_group,
        **student_options,
    )  # fmt: skip
    reference, _ = of_reference(
        head_call, ref_hidden.detach(), ref_weight.detach(), targets, _NOTHING, _NOTHING,
        bias=None if ref_bias is None else ref_bias.detach(), logit_scale=ref_logit_scale,
        temperature=temperature if ref_temperature is None else ref_temperature, softcap=ref_softcap,
    )  # fmt: skip
    ours, theirs = student.vocabulary, reference.vocabulary
    most = 0 if shard is not None else max(_MOST_PADDING, _MOST_PADDING_SHARE * max(ours, theirs))
    if abs(ours - theirs) > most:
        raise ValueError(
            f"ref_weight has {theirs} rows and weight {ours}, which is more than padding: give two heads of "
            "one tokenizer, with a process_group split alike"
        )
    entries = min(ours, theirs)
    if topk is not None and (isinstance(topk, bool) or not isinstance(topk, int) or not 0 < topk <= entries):
        raise ValueError(f"topk must be an integer in [1, V = {entries}], or None for all, got {topk!r}")
    if topk is not None and shard is not None:
        raise ValueError(f"topk={topk} needs the whole vocabulary: leave it out with a process_group")
    if direction == "jsd" and beta in (0, 1):  # the mixture is one of the two
        direction = "reverse" if beta == 1 else "forward"
    wide = torch.float64 in (student.hidden.dtype, reference.hidden.dtype)

    def common_part(call: HeadCall) -> HeadCall:
        hidden, weight = (t.double() if wide else t for t in (call.hidden, call.weight[:entries]))
        bias = None if call.bias is None else call.bias[:entries]
        targets = torch.where(call.targets < 0, call.targets, entries)
        return call._replace(hidden=hidden, weight=weight, bias=bias, targets=targets)

    tolerance = student.tolerance if shard is None else 0.0
    student = common_part(student)._replace(jacobian=shard is None, tolerance=tolerance)
    call = KLCall(student, common_part(reference), direction=direction, beta=float(beta), topk=topk)
    return call, shard


def of_reference(check: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a check for the reference's arguments: its errors, which begin with a name, get "ref_"."""
    try:
        return check(*arguments, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"ref_{error}") from None


def check_exact_kl(
    reference: Mapping[str, Tensor | None],
    config: GRPOLossConfig,
    columns: Mapping[str, Tensor | None],
    options: Mapping[str, Any],
) -> None:
    """Raise ValueError unless the reference is given exactly where the exact KL reads it."""
    if config.distills:
        raise ValueError(f"loss_type={config.loss_type!r} is no policy loss: call linear_kl")
    others = {"ref_logprobs": columns["ref_logprobs"], "weight_grad": options.get("weight_grad")}
    for name, given in (others if config.needs_exact_kl else reference).items():
        if given is not None:
            kind = f"kl_estimator={config.kl_estimator!r} and beta={config.beta}"
            raise ValueError(f"{name} is not read with {kind}: leave it out, or change config")
    if not config.needs_exact_kl:
        return
    for name in ("hidden", "weight", *(["bias"] if options.get("bias") is not None else [])):
        if reference[f"ref_{name}"] is None:
            raise ValueError(f"ref_{name} is None, but kl_estimator='exact' reads it: give the reference's")


def check_outputs(outputs: Iterable[str]) -> frozenset[str]:
    """Return the requested statistics as a set; raise an error for an unknown name."""
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise TypeError(f"outputs must be a sequence of names, as ('entropy',), got {outputs!r}")
    wanted = frozenset(outputs)
    if unknown := wanted - set(OUTPUTS):
        raise ValueError(f"outputs has unknown names {sorted(unknown)}: choose from {list(OUTPUTS)}")
    return wanted


def check_numbers(
    *, positive: bool = False, optional: bool = False, most: float = math.inf, **values: object
) -> None:
    """Raise ValueError unless each is a finite number in [0, `most`], or (0, `most`] if `positive`."""
    for name, value in values.items():
        if optional and value is None:
            continue
        # By comparisons, which a compiler can trace.
        fits = isinstance(value, Real) and 0 <= value <= most and value < math.inf  # type: ignore[operator]
        if not fits or (positive and value == 0):
            raise ValueError(f"{name} must be {_NUMBERS[name]}, got {value!r}")


def check_policy_loss(
    hidden: Tensor,
    targets: Tensor,
    columns: Mapping[str, Tensor | None],
    num_sequences: int | None,
    config: GRPOLossConfig,
    totals: StepTotals | None,
    entropy_coef: float | None,
) -> None:
    """Check the inputs of a policy loss: (N,) each, on one device.

    Values of sequence ids and mask are read on a CPU only.

    Args:
        columns: those of `TOKEN_COLUMNS`, (N,) each by name, or None.
    """
    _check_kind("config", config, GRPOLossConfig)
    _check_kind("totals", totals, StepTotals | None)
    check_numbers(optional=True, entropy_coef=entropy_coef)
    _check("hidden", hidden)
    if hidden.dim() != 2:
        raise ValueError(
            f"hidden must be (N, H), the packed batch, got shape {tuple(hidden.shape)}: select the rows that "
            "predict completion tokens, as hidden[mask]"
        )
    for name, tensor in {"targets": targets, **columns}.items():
        if tensor is not None or name in _NEEDED:
            _check(name, tensor, hidden.shape[:1], hidden.device)
    if not config.is_custom:
        refuse_gradients(columns)
    if num_sequences is not None and (not isinstance(num_sequences, Integral) or num_sequences < 0):
        raise ValueError(f"num_sequences must be a count, or None to count them, got {num_sequences!r}")
    if hidden.device.type != "cpu" or torch.compiler.is_compiling():
        return
    ids, mask = columns["sequence_ids"], columns["loss_mask"]
    if ids is not None and ids.numel():
        _check_sequences(ids, num_sequences)
    if mask is not None and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("loss_mask must hold zeros and ones: to weight tokens, scale their advantages")


def check_values(call: HeadCall) -> None:
    """Raise ValueError for a target outside the vocabulary or a temperature that is not positive.

    On an accelerator a check would stall it: a wrong target or temperature makes its row's log-probability
    NaN instead. Memory shared with `weight_grad` is checked here again, because a compiler cannot see it.
    """
    _check_memory(call.weight_grad, call.hidden, call.weight, call.bias)
    if call.targets.device.type != "cpu":
        return
    if (invalid := call.targets == ROW_INVALID).any():
        row = int(invalid.nonzero()[0])
        raise ValueError(
            f"targets must lie in [0, V) or equal ignore_index, but row {row}, targets.flatten()[{row}], is "
            "outside: check that the tokenizer fits the weight, or set ignore_index to what pads the targets"
        )
    if call.inv_temperature is not None and (invalid := call.inv_temperature.isnan()).any():
        row = int(invalid.nonzero()[0])
        raise ValueError(
            f"temperature must be positive and finite, but row {row}, temperature.flatten()[{row}], is not"
        )


def _check_kind(name: str, value: object, kind: Any) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {getattr(kind, '__name__', kind)}, got {value!r}")


def _check(
    name: str,
    tensor: Tensor | None,
    shape: tuple[int, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise unless it is a tensor of the table's dtypes with this shape and device."""
    kinds, what = _TENSORS[name]
    if not isinstance(tensor, Tensor) or tensor.dtype not in kinds:
        found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        choice = ", ".join(str(kind).removeprefix("torch.") for kind in kinds)
        raise TypeError(f"{name} must be a tensor of {choice}, got {found}")
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"{name} is a DTensor: give {name}.full_tensor(), or a split vocabulary as {name}.to_local() "
            "with its process_group"
        )
    if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, AsyncCollectiveTensor):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, which wraps other tensors: give {name}.dequantize(), or a "
            "plain tensor"
        )
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}: it is {what}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the others on {device}: move one to the other")


def _check_operands(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, weight_grad: Tensor | None
) -> None:
    _check("hidden", hidden)
    _check("weight", weight, device=hidden.device)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"weight must be (V, H) with entries, got shape {tuple(weight.shape)}: gather it first where "
            "FSDP or ZeRO-3 has split it"
        )
    leading, device = hidden.shape[:-1], hidden.device
    _check("hidden", hidden, (*leading, weight.shape[1]))
    _check("targets", targets, leading, device)
    if bias is not None:
        _check("bias", bias, weight.shape[:1], device)
    if weight_grad is None:
        return
    _check("weight_grad", weight_grad, weight.shape, device)
    if weight_grad.stride(1) != 1 or weight_grad.stride(0) < weight.shape[1] or weight_grad.requires_grad:
        raise ValueError(
            "weight_grad must have unit stride along H, separate rows and no requires_grad, got strides "
            f"{weight_grad.stride()} and requires_grad={weight_grad.requires_grad}: make a new one"
        )
    _check_memory(weight_grad, hidden, weight, bias)
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            "weight has gradient hooks, which do not run for a gradient added to weight_grad in place: "
            "remove them, or leave weight_grad out"
        )


def _check_memory(weight_grad: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight_grad is None or torch.compiler.is_compiling():
        return
    start, end = _bytes_of(weight_grad)
    for name, operand in {"weight": weight, "hidden": hidden, "bias": bias}.items():
        if operand is None or not operand.numel() or not weight_grad.numel():
            continue
        # Storages are compared by identity: an address is zero on the meta device.
        if operand.untyped_storage()._cdata != weight_grad.untyped_storage()._cdata:
            continue
        operand_start, operand_end = _bytes_of(operand)
        if start < operand_end and operand_start < end:
            raise ValueError(
                f"weight_grad shares memory with {name}, which the backward would overwrite: give a separate "
                "buffer, such as torch.zeros_like(weight)"
            )


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return where the tensor's bytes begin and end in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, itemsize = tensor.storage_offset(), tensor.element_size()
    return int(start * itemsize), int((start + last + 1) * itemsize)


def _refuse_transforms(**operands: object) -> None:
    """Raise NotImplementedError under forward-mode differentiation or a transform of `torch.func`."""
    dual = [
        name
        for name, operand in operands.items()
        if isinstance(operand, Tensor) and forward_ad.unpack_dual(operand).tangent is not None
    ]
    if dual or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{dual[0] if dual else 'hidden'} is under a torch.func transform or forward-mode "
            "differentiation, but the head has first derivatives in reverse mode only: use "
            "torch.autograd.grad, or (hidden @ weight.T).log_softmax(-1)"
        )


def _check_sequences(ids: Tensor, num_sequences: int | None) -> None:
    if not 0 <= ids.min() <= ids.max() < (math.inf if num_sequences is None else num_sequences):
        raise ValueError(
            f"sequence_ids must lie in [0, num_sequences = {num_sequences}), got {int(ids.min())} to "
            f"{int(ids.max())}: number the batch's sequences from 0"
        )
    runs, count = torch.unique_consecutive(ids).numel(), torch.unique(ids).numel()
    if runs != count:
        raise ValueError(
            f"sequence_ids must be contiguous for each sequence, got {runs} runs of {count} ids: sort the "
            "tokens by sequence"
        )


@constant_when_compiled
def _has_autocast(kind: str) -> bool:
    """Return whether a device type has autocast; torch 2.11's compiler cannot trace the call."""
    return is_autocast_available(kind)


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return autocast's dtype where it is enabled, as for a linear layer; else the promoted dtype."""
    kind = hidden.device.type
    autocast = _has_autocast(kind) and torch.is_autocast_enabled(kind)
    if autocast and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(hidden.dtype, weight.dtype)


def _inverse_temperature(temperature: float | Tensor, targets: Tensor, kind: torch.dtype) -> Tensor | None:
    """Return (N,) 1/temperature, or None for a temperature of 1; NaN for entries that are not positive."""
    accumulator = torch.float64 if kind == torch.float64 else torch.float32
    if not isinstance(temperature, Tensor):
        check_numbers(positive=True, temperature=temperature)
        if temperature == 1.0:
            return None
        # A compiler would take `1.0 / temperature` for a constant, and recompile for the next one.
        return torch.ones_like(targets.reshape(-1), dtype=accumulator) / float(temperature)
    if temperature.dim() and temperature.shape != targets.shape:
        raise ValueError(
            f"temperature must be a number or of the tokens' shape {tuple(targets.shape)}, "
            f"got shape {tuple(temperature.shape)}"
        )
    if temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError("temperature requires grad, but gets no gradient here: give temperature.detach()")
    values = temperature.detach().to(targets.device, accumulator).expand(targets.shape).reshape(-1)
    good = (values > 0) & values.isfinite()
    return torch.where(good, values.reciprocal(), torch.nan)
