"""The head as two opaque operators with autograd between them.

`torch.compile` and CUDA graphs see `grpo_fast::head_forward` and `grpo_fast::head_backward`; which path runs
inside is the plan's affair. Besides its statistics the forward returns state for the backward, since an
operator's results are all that autograd may keep. Kernels start on the current device, so the operators make
it that of their tensors.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.head import certified, cuda, reference
from grpo_fast.head.checks import check_values
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import Device, HeadPlan, Path, Workload, head_path, plan_head
from grpo_fast.head.problem import (
    ROW_INVALID,
    HeadGradients,
    HeadProblem,
    Request,
    RowGradients,
    RowStatistics,
)

_NUM_STATISTICS = 7
_NUM_STATE = 6  # jacobian (reference path); `accelerated.State` (Triton path); empty where not used
_NUM_DIFFERENTIABLE = 4  # the first statistics: logprob, logsumexp, entropy, mean_logit

_PROBLEM = (
    "Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, Tensor? inv_temperature, "
    "float logit_scale, float? softcap"
)
_FORWARD = (
    f"({_PROBLEM}, bool entropy, bool mean_logit, bool max_logit, bool log_sum_sq, "
    "bool jacobian, float? tolerance, Tensor? weight_gradient, bool keep) -> "
    f"({', '.join(['Tensor'] * (_NUM_STATISTICS + _NUM_STATE + 1))})"
)
_BACKWARD = (
    "(Tensor? g_logprob, Tensor? g_logsumexp, Tensor? g_entropy, Tensor? g_mean_logit, "
    f"{_PROBLEM}, Tensor[] statistics, Tensor[] state, Tensor(a!) certificate, "
    "Tensor(b!)? weight_gradient, bool need_hidden, bool need_weight, bool need_bias, float? tolerance) -> "
    "(Tensor, Tensor, Tensor)"
)


class _ForwardArguments(NamedTuple):
    """Arguments of the forward operator, in the schema's order."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    inv_temperature: Tensor | None
    logit_scale: float
    softcap: float | None
    entropy: bool
    mean_logit: bool
    max_logit: bool
    log_sum_sq: bool
    jacobian: bool
    tolerance: float | None
    weight_gradient: Tensor | None
    keep: bool

    @property
    def problem(self) -> HeadProblem:
        return HeadProblem(*self[:7])

    @property
    def request(self) -> Request:
        return Request(self.entropy, self.mean_logit, self.max_logit, self.log_sum_sq)


class _BackwardArguments(NamedTuple):
    """Arguments of the backward operator, in the schema's order."""

    g_logprob: Tensor | None
    g_logsumexp: Tensor | None
    g_entropy: Tensor | None
    g_mean_logit: Tensor | None
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    inv_temperature: Tensor | None
    logit_scale: float
    softcap: float | None
    statistics: list[Tensor]
    state: list[Tensor]
    certificate: Tensor
    weight_gradient: Tensor | None
    need_hidden: bool
    need_weight: bool
    need_bias: bool
    tolerance: float | None

    @property
    def gradients(self) -> RowGradients:
        return RowGradients(*self[:4])

    @property
    def problem(self) -> HeadProblem:
        return HeadProblem(*self[4:11])

    @property
    def wanted(self) -> dict[str, bool | Tensor | None]:
        """Which gradients, and where the weight's goes."""
        names = ("need_hidden", "need_weight", "need_bias", "weight_gradient")
        return {name: getattr(self, name) for name in names}


def head_statistics(
    problem: HeadProblem,
    request: Request,
    *,
    differentiable: frozenset[str],
    tolerance: float | None,
    weight_gradient: Tensor | None = None,
    recompute: bool = True,
) -> tuple[RowStatistics, Certificate]:
    """Per-row statistics, differentiable in hidden, weight and bias.

    Args:
        differentiable: names of the statistics a gradient may come back through. With the log-probability
            alone and a frozen weight, the forward prepares the whole gradient where that is cheaper.
        weight_gradient: (V, H), what the backward adds the weight's gradient to in place of returning it.
        recompute: False: the kernels keep N·V elements for the backward instead.
    """
    jacobian = (
        differentiable <= {"logprob"}
        and torch.is_grad_enabled()
        and problem.hidden.requires_grad
        and not problem.weight.requires_grad
        and weight_gradient is None
        and (problem.bias is None or not problem.bias.requires_grad)
    )
    results = _head_forward(
        problem.hidden,
        problem.weight,
        problem.targets,
        problem.bias,
        problem.inv_temperature,
        problem.logit_scale,
        problem.softcap,
        request.entropy,
        request.mean_logit,
        request.max_logit,
        request.log_sum_sq,
        jacobian,
        tolerance,
        weight_gradient,
        not recompute and torch.is_grad_enabled() and _differentiates(problem, weight_gradient),
    )
    return RowStatistics(*results[:_NUM_STATISTICS]), Certificate(results[-1])


def _differentiates(problem: HeadProblem, weight_gradient: Tensor | None) -> bool:
    leaves = (problem.hidden, problem.weight, problem.bias)
    return weight_gradient is not None or any(leaf is not None and leaf.requires_grad for leaf in leaves)


def path_of(problem: HeadProblem) -> Path:
    """Which path this problem takes."""
    return _path_on(problem.hidden.device.type, problem.hidden.device.index, problem.hidden.dtype)


@torch.compiler.assume_constant_result
def _path_on(kind: str, index: int | None, dtype: torch.dtype) -> Path:
    """Of a device's facts alone, which a compiler need not trace."""
    return head_path(device_facts(kind, index), dtype)


@torch.library.custom_op("grpo_fast::head_forward", mutates_args=(), schema=_FORWARD)
def _head_forward(*arguments):
    call = _ForwardArguments(*arguments)
    problem, device = call.problem, call.hidden.device
    check_values(problem)
    plan = _plan(
        problem,
        call.tolerance,
        extra_statistics=call.request != Request(),
        aligned=_fits_descriptors(problem),
        keep=call.keep,
    )
    jacobian, *sorted_state = _empty_state(problem)
    with torch.cuda.device_of(call.hidden), torch.autocast(device.type, enabled=False):
        if plan.path == "triton":
            from grpo_fast.head import accelerated

            statistics, state = accelerated.forward(problem, call.request, plan)
            sorted_state = state.in_order()
        else:
            statistics, computed = reference.forward(
                problem, call.request, plan.chunks, jacobian=call.jacobian and plan.backward == "dense"
            )
            jacobian = jacobian if computed is None else computed
    if device.type != "cpu":
        statistics.logprob.masked_fill_(problem.targets == ROW_INVALID, torch.nan)
    return (*statistics.in_order(), jacobian, *sorted_state, Certificate.pending(device).values)


@_head_forward.register_fake
def _head_forward_fake(*arguments):
    call = _ForwardArguments(*arguments)
    problem, rows = call.problem, call.hidden.shape[0]
    wanted = (True, True, call.entropy, call.mean_logit, call.max_logit, call.max_logit, call.log_sum_sq)
    statistics = [problem.hidden.new_empty(rows if want else 0, dtype=problem.accumulator) for want in wanted]
    jacobian, *sorted_state = _empty_state(problem)
    plan = _plan(problem, call.tolerance, keep=call.keep)
    if plan.path == "triton":
        from grpo_fast.head import accelerated

        sorted_state = accelerated.State.fake(problem, plan.keep).in_order()
    elif call.jacobian and plan.backward == "dense":
        jacobian = problem.hidden.new_empty(problem.hidden.shape, dtype=problem.accumulator)
    certificate = problem.hidden.new_empty(Certificate.SIZE, dtype=torch.float32)
    return (*statistics, jacobian, *sorted_state, certificate)


@torch.library.custom_op(
    "grpo_fast::head_backward", mutates_args=("certificate", "weight_gradient"), schema=_BACKWARD
)
def _head_backward(*arguments):
    call = _BackwardArguments(*arguments)
    problem, gradients = call.problem, call.gradients
    statistics = RowStatistics(*call.statistics)
    dense = gradients.entropy is not None or gradients.mean_logit is not None
    plan = _plan(
        problem,
        call.tolerance,
        dense_gradient=dense,
        aligned=_fits_descriptors(problem),
        trainable=call.need_weight,
    )
    left_out = None
    with torch.cuda.device_of(call.hidden), torch.autocast(call.hidden.device.type, enabled=False):
        if plan.path == "triton":
            from grpo_fast.head import accelerated

            state = accelerated.State(*call.state[1:])
            result, left_out = accelerated.backward(
                problem, statistics, gradients, state, plan, **call.wanted
            )
        elif plan.backward == "sparse":
            result, left_out = certified.backward(
                problem, statistics, gradients, tolerance=plan.tolerance, **call.wanted
            )
        else:
            jacobian = call.state[0] if call.state[0].numel() else None
            result = reference.backward(
                problem, statistics, gradients, plan.chunks, jacobian=jacobian, **call.wanted
            )
    Certificate(call.certificate).fill(left_out)
    if call.weight_gradient is not None:
        result = replace(result, weight=None)
    return _without_none(result, problem.hidden)


@_head_backward.register_fake
def _head_backward_fake(*arguments):
    call = _BackwardArguments(*arguments)
    returns_weight = call.need_weight and call.weight_gradient is None
    result = HeadGradients(
        hidden=call.hidden.new_empty(call.hidden.shape) if call.need_hidden else None,
        weight=call.weight.new_empty(call.weight.shape) if returns_weight else None,
        bias=call.bias.new_empty(call.bias.shape) if call.need_bias else None,
    )
    return _without_none(result, call.hidden)


def _setup_context(ctx, inputs, output) -> None:
    call = _ForwardArguments(*inputs)
    *kept, ctx.certificate = output
    # Not saved for backward: another head's backward may add to it in between, which saved tensors forbid.
    ctx.weight_gradient = call.weight_gradient
    ctx.logit_scale, ctx.softcap, ctx.tolerance = call.logit_scale, call.softcap, call.tolerance
    ctx.save_for_backward(call.hidden, call.weight, call.targets, call.bias, call.inv_temperature, *kept)
    ctx.mark_non_differentiable(*output[_NUM_DIFFERENTIABLE:])
    ctx.set_materialize_grads(False)


def _backward(ctx, *gradients):
    hidden, weight, targets, bias, inv_temperature, *output = ctx.saved_tensors
    need_hidden, need_weight, _, need_bias, *others = ctx.needs_input_grad
    of_hidden, of_weight, of_bias = _head_backward(
        *gradients[:_NUM_DIFFERENTIABLE],
        hidden,
        weight,
        targets,
        bias,
        inv_temperature,
        ctx.logit_scale,
        ctx.softcap,
        output[:_NUM_STATISTICS],
        output[_NUM_STATISTICS:],
        ctx.certificate,
        ctx.weight_gradient,
        need_hidden,
        need_weight or ctx.weight_gradient is not None,
        need_bias,
        ctx.tolerance,
    )
    return (
        of_hidden if need_hidden else None,
        of_weight if need_weight and ctx.weight_gradient is None else None,
        None,
        of_bias if need_bias else None,
        *(None for _ in others),
    )


_head_forward.register_autograd(_backward, setup_context=_setup_context)


def _empty_state(problem: HeadProblem) -> tuple[Tensor, ...]:
    return (
        problem.hidden.new_empty(0, dtype=problem.accumulator),
        problem.hidden.new_empty(0, dtype=torch.float32),
        problem.targets.new_empty(0),
        problem.targets.new_empty(0, dtype=torch.int32),
        problem.hidden.new_empty(0),
        problem.hidden.new_empty(0, dtype=torch.float32),
    )


def _without_none(gradients: HeadGradients, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An operator returns tensors: what was not asked for is empty."""
    given = (gradients.hidden, gradients.weight, gradients.bias)
    return tuple(like.new_empty(0) if gradient is None else gradient for gradient in given)


def _plan(
    problem: HeadProblem,
    tolerance: float | None,
    *,
    extra_statistics: bool = False,
    dense_gradient: bool = False,
    aligned: bool = True,
    keep: bool = False,
    trainable: bool = True,
) -> HeadPlan:
    work = Workload(
        rows=problem.hidden.shape[0],
        vocabulary=problem.vocabulary,
        dtype=problem.hidden.dtype,
        softcap=problem.softcap is not None,
        extra_statistics=extra_statistics,
        dense_gradient=dense_gradient,
        tolerance=tolerance,
        aligned=aligned,
        keep=keep,
        hidden_size=problem.hidden.shape[1],
        trainable=trainable,
    )
    return plan_head(device_facts(problem.hidden.device.type, problem.hidden.device.index), work)


def _fits_descriptors(problem: HeadProblem) -> bool:
    """Whether tensor descriptors can address the operands. Hidden states reach the kernels contiguous."""
    weight, itemsize = problem.weight, problem.weight.element_size()
    row = weight.stride(0) if weight.stride(1) == 1 else weight.shape[1]
    aligned = all(length * itemsize % 16 == 0 for length in (row, weight.shape[1]))
    return aligned and weight.data_ptr() % 16 == 0


@functools.cache
def device_facts(kind: str, index: int | None) -> Device:
    """What the planner asks of a device, such as `cuda` and its index."""
    if kind != "cuda":
        return Device(kind)
    facts = torch.cuda.get_device_properties(index)
    return Device(
        kind,
        capability=(facts.major, facts.minor),
        shared_memory=facts.shared_memory_per_block_optin,
        has_triton=importlib.util.find_spec("triton") is not None,
        has_library=cuda.usable(torch.cuda.current_device() if index is None else index),
    )
