"""The head's custom operators, and the choice between kernels and plain torch for each call."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_fast.head import divergence, reference
from grpo_fast.head.autograd import define_operators
from grpo_fast.head.call import (
    ROW_INVALID,
    DivergenceGradients,
    HeadCall,
    HeadGradients,
    KLCall,
    RowDivergence,
    RowGradients,
    RowStatistics,
    Saved,
    Wanted,
    constant_when_compiled,
    schema_of,
)
from grpo_fast.head.checks import check_values, of_reference
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import Backend, Device, HeadPlan, Workload, head_backend, plan_head
from grpo_fast.head.tuning import SHARED_MEMORY


def head_statistics(call: HeadCall) -> tuple[RowStatistics, Certificate]:
    """Compute per-row statistics, differentiable in hidden, weight and bias.

    `call.keep` and `call.jacobian` allow the forward to prepare the backward: `keep` where anything is
    differentiated, `jacobian` where only the hidden states are.
    """
    of_hidden, trained = _differentiated(call)
    trained = trained or call.weight_grad is not None
    call = call._replace(
        jacobian=call.jacobian and of_hidden and not trained,
        keep=call.keep and (of_hidden or (torch.is_grad_enabled() and trained)),
    )
    *results, certificate = _head_forward(*call)
    return RowStatistics(*results[: len(RowStatistics._fields)]), Certificate(certificate)


def row_divergence(call: KLCall) -> tuple[RowDivergence, Certificate]:
    """Compute per-row divergences, differentiable in the student's hidden states, weight and bias.

    `jacobian` of the student says whether the divergence is the only result that is differentiated.
    """
    of_hidden, trained = _differentiated(call.student)
    student = call.student._replace(jacobian=call.student.jacobian and of_hidden and not trained)
    *results, certificate = _divergence_forward(*call._replace(student=student).fields)
    return RowDivergence(*results[: len(RowDivergence._fields)]), Certificate(certificate)


def _differentiated(call: HeadCall) -> tuple[bool, bool]:
    """Return whether the hidden states take a gradient, and whether the weight or the bias does."""
    trained = any(p is not None and p.requires_grad for p in (call.weight, call.bias))
    return torch.is_grad_enabled() and call.hidden.requires_grad, trained


def _forward(call: HeadCall) -> tuple[RowStatistics, Saved]:
    check_values(call)
    plan = _plan_forward(call)
    call = call._replace(jacobian=plan.jacobian)
    if plan.backend == "triton":
        from grpo_fast.head import accelerated

        statistics, saved = accelerated.forward(call, plan)
    else:
        statistics, saved = reference.forward(call, plan.chunks)
    if call.hidden.device.type != "cpu":
        statistics.logprob.masked_fill_(call.targets == ROW_INVALID, torch.nan)
    return statistics, saved


def _allocate(call: HeadCall) -> tuple[RowStatistics, Saved]:
    plan = _plan_forward(call, aligned=True)
    if plan.backend == "triton":
        from grpo_fast.head import accelerated

        return RowStatistics.allocate(call), accelerated.allocate_saved(call, plan)
    return RowStatistics.allocate(call), Saved.empty(call, jacobian=plan.jacobian)


def _backward(
    call: HeadCall,
    statistics: RowStatistics,
    saved: Saved,
    gradients: RowGradients,
    wanted: Wanted,
    certificate: Certificate,
) -> HeadGradients:
    of_entropy, of_mean = gradients.entropy is not None, gradients.mean_logit is not None
    plan = plan_of(call, entropy_gradient=of_entropy, mean_gradient=of_mean)
    if plan.backend == "triton":
        from grpo_fast.head import accelerated

        return accelerated.backward(call, statistics, gradients, wanted, saved, certificate, plan)
    return reference.backward(call, statistics, gradients, wanted, certificate, plan.chunks)


_head_forward = define_operators(
    "head", schema_of(HeadCall), HeadCall, RowStatistics, RowGradients,
    forward=_forward, allocate=_allocate, backward=_backward,
)  # fmt: skip


def _forward_divergence(call: KLCall) -> tuple[RowDivergence, Saved]:
    check_values(call.student)
    of_reference(check_values, call.reference)
    if _runs_kernels(call):
        from grpo_fast.head import accelerated_divergence

        return accelerated_divergence.forward(call, plan_of(call.student))
    return divergence.forward(call)


def _allocate_divergence(call: KLCall) -> tuple[RowDivergence, Saved]:
    if _runs_kernels(call):
        from grpo_fast.head import accelerated_divergence

        plan = plan_of(call.student, aligned=True)
        return RowDivergence.allocate(call), accelerated_divergence.allocate_saved(call, plan)
    return RowDivergence.allocate(call), Saved.empty(call.student, jacobian=call.student.jacobian)


def _backward_divergence(
    call: KLCall,
    rows: RowDivergence,
    saved: Saved,
    gradients: DivergenceGradients,
    wanted: Wanted,
    certificate: Certificate,
) -> HeadGradients:
    certificate.fill_exact()
    if _runs_kernels(call):
        from grpo_fast.head import accelerated_divergence

        plan = plan_of(call.student)
        return accelerated_divergence.backward(call, rows, gradients, wanted, saved, certificate, plan)
    return divergence.backward(call, rows, gradients, wanted)


_divergence_forward = define_operators(
    "divergence", schema_of(KLCall), KLCall.of_fields, RowDivergence, DivergenceGradients,
    forward=_forward_divergence, allocate=_allocate_divergence, backward=_backward_divergence,
)  # fmt: skip


def _runs_kernels(call: KLCall) -> bool:
    """Return whether kernels compute a divergence. Top-k entries are found among whole logits, in torch."""
    sides = (call.student.hidden, call.reference.hidden)
    backends = {backend_on(t.device.type, t.device.index, t.dtype) for t in sides}
    return backends == {"triton"} and call.topk is None


@constant_when_compiled
def backend_on(kind: str, index: int | None, dtype: torch.dtype) -> Backend:
    """Return the backend of a device for a dtype; a compiler takes it for a constant."""
    return head_backend(_facts_for_heads(kind, index), dtype)


def _plan_forward(call: HeadCall, *, aligned: bool | None = None) -> HeadPlan:
    facts = {"extra_statistics": call.extra_statistics, "keep": call.keep, "jacobian": call.jacobian}
    return plan_of(call, aligned=aligned, **facts)


def plan_of(call: HeadCall, *, aligned: bool | None = None, **facts: Any) -> HeadPlan:
    """Plan a call, with facts named as in `Workload`; None for `aligned` reads it from the weight."""
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
    """Return whether tensor descriptors can address the operands. Hidden states reach kernels contiguous."""
    itemsize = weight.element_size()
    row = weight.stride(0) if weight.stride(1) == 1 else weight.shape[1]
    aligned = all(length * itemsize % 16 == 0 for length in (row, weight.shape[1]))
    return aligned and row >= weight.shape[1] and weight.data_ptr() % 16 == 0  # rows must not overlap


_WITHOUT_KERNELS: dict[tuple[str, int | None], bool] = {}
"""Devices whose heads run plain torch; True where kernels failed."""


def use_kernels(device: torch.device, use: bool, *, failed: bool = False) -> None:
    """Run the heads of this device with kernels, where it has them, or with plain torch."""
    key = device.type, device.index
    _WITHOUT_KERNELS.pop(key, None)
    if not use:
        _WITHOUT_KERNELS[key] = failed


def kernels_failed(device: torch.device) -> bool:
    """Return whether plain torch has replaced kernels that failed on this device."""
    return _WITHOUT_KERNELS.get((device.type, device.index), False)


def _facts_for_heads(kind: str, index: int | None) -> Device:
    facts = device_facts(kind, index)
    return replace(facts, has_triton=False) if (kind, index) in _WITHOUT_KERNELS else facts


@functools.cache
def device_facts(kind: str, index: int | None) -> Device:
    """Return what a plan needs to know of a device, given as its type and index."""
    if kind != "cuda":
        return Device(kind)
    facts: Any = torch.cuda.get_device_properties(index)  # an installed torch has more than its stub says
    has_triton = importlib.util.find_spec("triton") is not None
    if torch.version.hip:  # whose capability looks like NVIDIA's and means something else
        gfx = facts.gcnArchName.split(":")[0]
        return Device(kind, shared_memory=SHARED_MEMORY.get(gfx, 0), has_triton=has_triton, gfx=gfx)
    memory = facts.shared_memory_per_block_optin
    return Device(kind, (facts.major, facts.minor), memory, has_triton)
