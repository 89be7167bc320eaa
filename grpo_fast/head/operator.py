"""The head as two opaque operators with autograd between them.

`torch.compile` sees `grpo_fast::head_forward` and `grpo_fast::head_backward`; the plan chooses the path that
runs inside. Inductor keeps both out of its CUDA graphs, in which the backward could not ask the host. Besides
its statistics the forward returns what it saves for the backward: autograd keeps only an operator's results.
Kernels start on the current device, so the operators make it that of their tensors.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_fast.head import reference
from grpo_fast.head.call import (
    ROW_INVALID,
    HeadCall,
    HeadGradients,
    RowGradients,
    RowStatistics,
    SavedForBackward,
    Wanted,
    constant_when_compiled,
    schema_of,
)
from grpo_fast.head.checks import check_values
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import Backend, Device, HeadPlan, Workload, head_backend, plan_head
from grpo_fast.head.tuning import SHARED_MEMORY

NO_SECOND_DERIVATIVE = "the head has first derivatives only: call backward without create_graph"
_NUM_CALL, _NUM_STATISTICS, _NUM_SAVED, _NUM_DIFFERENTIABLE = (
    len(kind._fields) for kind in (HeadCall, RowStatistics, SavedForBackward, RowGradients)
)
_NUM_OPERANDS = HeadCall._fields.index("logit_scale")  # tensors that a backward reads
_CALL = schema_of(HeadCall)
_RETURNED = ", ".join(["Tensor"] * (_NUM_STATISTICS + _NUM_SAVED + 1))
_BACKWARD = (
    f"({_CALL.replace('Tensor? weight_grad', 'Tensor(a!)? weight_grad')}, {schema_of(RowGradients, 'g_')}, "
    "bool want_hidden, bool want_weight, bool want_bias, Tensor[] statistics, Tensor[] saved) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)


def head_statistics(call: HeadCall) -> tuple[RowStatistics, Certificate]:
    """Per-row statistics, differentiable in hidden, weight and bias.

    `call.keep` and `call.jacobian` say what the forward may prepare: the one holds where anything is
    differentiated, the other where that is the hidden states alone.
    """
    parameters = (call.weight, call.bias)
    trained = call.weight_grad is not None or any(p is not None and p.requires_grad for p in parameters)
    of_hidden = torch.is_grad_enabled() and call.hidden.requires_grad
    call = call._replace(
        jacobian=call.jacobian and of_hidden and not trained,
        keep=call.keep and (of_hidden or (torch.is_grad_enabled() and trained)),
    )
    results = _head_forward(*call)
    return RowStatistics(*results[:_NUM_STATISTICS]), Certificate(results[-1])


def backend_of(call: HeadCall) -> Backend:
    """Which backend runs this call."""
    return backend_on(call.hidden.device.type, call.hidden.device.index, call.hidden.dtype)


@constant_when_compiled
def backend_on(kind: str, index: int | None, dtype: torch.dtype) -> Backend:
    """Of a device's facts alone, which a compiler need not trace."""
    return head_backend(_facts_for_heads(kind, index), dtype)


@torch.library.custom_op(
    "grpo_fast::head_forward",
    mutates_args=(),
    schema=f"({_CALL}) -> ({_RETURNED})",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _head_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = HeadCall(*arguments)
    check_values(call)
    device = call.hidden.device
    plan = _plan_forward(call)
    call = call._replace(jacobian=plan.jacobian)
    with torch.cuda.device_of(call.hidden), torch.autocast(device.type, enabled=False):
        if plan.backend == "triton":
            from grpo_fast.head import accelerated

            statistics, saved = accelerated.forward(call, plan)
        else:
            statistics, saved = reference.forward(call, plan.chunks)
    if device.type != "cpu":
        statistics.logprob.masked_fill_(call.targets == ROW_INVALID, torch.nan)
    return (*statistics, *saved, Certificate.pending(device).values)


@_head_forward.register_fake
def _head_forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call = HeadCall(*arguments)
    plan = _plan_forward(call, aligned=True)
    if plan.backend == "triton":
        from grpo_fast.head import accelerated

        saved = accelerated.allocate_saved(call, plan)
    else:
        saved = SavedForBackward.empty(call, jacobian=plan.jacobian)
    certificate = call.hidden.new_empty(Certificate.SIZE, dtype=torch.float32)
    return (*RowStatistics.allocate(call), *saved, certificate)


@torch.library.custom_op(
    "grpo_fast::head_backward",
    mutates_args=("weight_grad",),
    schema=_BACKWARD,
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _head_backward(*arguments: Any) -> tuple[Tensor, ...]:
    call, gradients, wanted = _backward_call(arguments)
    statistics, saved = RowStatistics(*arguments[-2]), SavedForBackward(*arguments[-1])
    certificate = Certificate.pending(call.hidden.device)
    of_entropy, of_mean = gradients.entropy is not None, gradients.mean_logit is not None
    plan = plan_of(call, entropy_gradient=of_entropy, mean_gradient=of_mean)
    with torch.cuda.device_of(call.hidden), torch.autocast(call.hidden.device.type, enabled=False):
        if saved.jacobian.numel():
            result = scaled_jacobian(call, gradients, saved.jacobian)
            certificate.fill_exact()
        elif plan.backend == "triton":
            from grpo_fast.head import accelerated

            result = accelerated.backward(call, statistics, gradients, wanted, saved, certificate, plan)
        else:
            result = reference.backward(call, statistics, gradients, wanted, certificate, plan.chunks)
    if wanted.into_weight is not None:
        result = result._replace(weight=None)
    # An operator returns tensors: what was not asked for is empty.
    made = (call.hidden.new_empty(0) if gradient is None else gradient for gradient in result)
    return (*made, certificate.values)


def scaled_jacobian(call: HeadCall, gradients: RowGradients, jacobian: Tensor) -> HeadGradients:
    """The whole gradient, as the log-probability alone was differentiable, in the hidden states alone."""
    assert gradients.logprob is not None
    upstream = torch.where(call.targets >= 0, gradients.logprob, 0)[:, None]
    hidden = (jacobian * upstream).masked_fill_(upstream == 0, 0)  # there the jacobian may be NaN
    return HeadGradients(hidden.to(call.hidden.dtype), None, None)


@_head_backward.register_fake
def _head_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call, _, wanted = _backward_call(arguments)
    of_weight = wanted.weight and wanted.into_weight is None

    def like(tensor: Tensor | None, want: bool) -> Tensor:
        return tensor.new_empty(tensor.shape) if want and tensor is not None else call.hidden.new_empty(0)

    asked = (call.hidden, wanted.hidden), (call.weight, of_weight), (call.bias, wanted.bias)
    certificate = call.hidden.new_empty(Certificate.SIZE, dtype=torch.float32)
    return (*(like(tensor, want) for tensor, want in asked), certificate)


def _backward_call(arguments: tuple[Any, ...]) -> tuple[HeadCall, RowGradients, Wanted]:
    call, others = HeadCall(*arguments[:_NUM_CALL]), arguments[_NUM_CALL:-2]
    gradients, wants = others[:_NUM_DIFFERENTIABLE], others[_NUM_DIFFERENTIABLE:]
    return call, RowGradients(*gradients), Wanted(*wants)._replace(into_weight=call.weight_grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *kept, ctx.certificate = output
    # With weight_grad, which is not saved for backward: another head's backward may add to it in between,
    # which saved tensors forbid.
    ctx.others = inputs[_NUM_OPERANDS:]
    ctx.save_for_backward(*inputs[:_NUM_OPERANDS], *kept)
    # AOTAutograd makes a gradient of zeros, of no elements here, for each differentiable result.
    call = HeadCall(*inputs)
    unasked = {"entropy": not call.entropy, "mean_logit": not call.mean_logit}
    constant = [getattr(RowStatistics(*output[:_NUM_STATISTICS]), name) for name in unasked if unasked[name]]
    ctx.mark_non_differentiable(*constant, *output[_NUM_DIFFERENTIABLE:])
    ctx.set_materialize_grads(False)


def refuse_second_derivative(gradients: Sequence[Tensor | None]) -> None:
    """Raise NotImplementedError in a backward that is differentiated, or run on a batch of gradients."""
    if torch.is_grad_enabled():
        raise NotImplementedError(NO_SECOND_DERIVATIVE)
    if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients):
        raise NotImplementedError(
            "the head has first derivatives of one upstream gradient at a time: leave out "
            "is_grads_batched=True, or vectorize=True"
        )


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(gradients)
    saved = ctx.saved_tensors  # once: a second read is an error under `torch.utils.checkpoint`
    operands, kept = saved[:_NUM_OPERANDS], list(saved[_NUM_OPERANDS:])
    call, wants = HeadCall(*operands, *ctx.others), HeadCall(*ctx.needs_input_grad)
    in_place = call.weight_grad is not None
    of_hidden, of_weight, of_bias, certificate = _head_backward(
        *(*call, *gradients[:_NUM_DIFFERENTIABLE], wants.hidden, wants.weight or in_place, wants.bias),
        *(kept[:_NUM_STATISTICS], kept[_NUM_STATISTICS:]),
    )
    if not torch.compiler.is_compiling():  # AOTAutograd's backward cannot write to a result of its forward
        ctx.certificate.copy_(certificate)
    return (
        of_hidden if wants.hidden else None,
        of_weight if wants.weight and not in_place else None,
        None,
        of_bias if wants.bias else None,
        *(None for _ in call[4:]),
    )


_head_forward.register_autograd(_backward, setup_context=_setup_context)


def _plan_forward(call: HeadCall, *, aligned: bool | None = None) -> HeadPlan:
    facts = {"extra_statistics": call.extra_statistics, "keep": call.keep, "jacobian": call.jacobian}
    return plan_of(call, aligned=aligned, **facts)


def plan_of(call: HeadCall, *, aligned: bool | None = None, **facts: Any) -> HeadPlan:
    """The plan, with facts of the call named as `Workload` names them; `aligned` is read off the weight."""
    device = call.hidden.device
    work = Workload(
        rows=call.hidden.shape[0],
        vocabulary=call.vocabulary,
        dtype=call.hidden.dtype,
        hidden_size=call.hidden.shape[1],
        softcap=call.softcap is not None,
        tolerance=call.tolerance,
        aligned=_fits_descriptors(call.weight) if aligned is None else aligned,
        **facts,
    )
    return plan_head(_facts_for_heads(device.type, device.index), work)


def _fits_descriptors(weight: Tensor) -> bool:
    """Whether tensor descriptors can address the operands. Hidden states reach the kernels contiguous."""
    itemsize = weight.element_size()
    row = weight.stride(0) if weight.stride(1) == 1 else weight.shape[1]
    aligned = all(length * itemsize % 16 == 0 for length in (row, weight.shape[1]))
    return aligned and row >= weight.shape[1] and weight.data_ptr() % 16 == 0  # rows must not overlap


_WITHOUT_KERNELS: dict[tuple[str, int | None], bool] = {}
"""Devices whose heads run plain torch, and whether that is because kernels failed."""


def use_kernels(device: torch.device, use: bool, *, failed: bool = False) -> None:
    """Let heads on this device run kernels, where it has them, or plain torch."""
    key = device.type, device.index
    _WITHOUT_KERNELS.pop(key, None)
    if not use:
        _WITHOUT_KERNELS[key] = failed


def kernels_failed(device: torch.device) -> bool:
    """Whether plain torch has replaced kernels that failed on this device."""
    return _WITHOUT_KERNELS.get((device.type, device.index), False)


def _facts_for_heads(kind: str, index: int | None) -> Device:
    facts = device_facts(kind, index)
    return replace(facts, has_triton=False) if (kind, index) in _WITHOUT_KERNELS else facts


@functools.cache
def device_facts(kind: str, index: int | None) -> Device:
    """What the planner asks of a device, such as `cuda` and its index."""
    if kind != "cuda":
        return Device(kind)
    facts: Any = torch.cuda.get_device_properties(index)  # an installed torch has more than its stub says
    has_triton = importlib.util.find_spec("triton") is not None
    if torch.version.hip:  # whose capability looks like NVIDIA's and means something else
        gfx = facts.gcnArchName.split(":")[0]
        return Device(kind, shared_memory=SHARED_MEMORY.get(gfx, 0), has_triton=has_triton, gfx=gfx)
    memory = facts.shared_memory_per_block_optin
    return Device(kind, (facts.major, facts.minor), memory, has_triton)
