"""The head as two opaque operators with autograd between them.

`torch.compile` and CUDA graphs see `grpo_fast::head_forward` and `grpo_fast::head_backward`; which path runs
inside is the plan's affair. Besides its statistics the forward returns state for the backward, since an
operator's results are all that autograd may keep. Kernels start on the current device, so the operators make
it that of their tensors.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from grpo_fast.head import reference
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
    State,
    Wanted,
)
from grpo_fast.head.tuning import SHARED_MEMORY

_NUM_PROBLEM, _NUM_STATISTICS, _NUM_STATE = (len(t._fields) for t in (HeadProblem, RowStatistics, State))
_NUM_DIFFERENTIABLE = len(RowGradients._fields)  # the first statistics
_AT_WANTED = _NUM_PROBLEM + _NUM_DIFFERENTIABLE  # place among the backward's arguments

_PROBLEM = (
    "Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, Tensor? inv_temperature, "
    "float logit_scale, float? softcap"
)
_FORWARD = (
    f"({_PROBLEM}, bool entropy, bool mean_logit, bool max_logit, bool log_sum_sq, bool jacobian, bool keep, "
    "float? tolerance, Tensor? weight_gradient) -> "
    f"({', '.join(['Tensor'] * (_NUM_STATISTICS + _NUM_STATE + 1))})"
)
_BACKWARD = (
    f"({_PROBLEM}, Tensor? g_logprob, Tensor? g_logsumexp, Tensor? g_entropy, Tensor? g_mean_logit, "
    "bool want_hidden, bool want_weight, bool want_bias, Tensor(a!)? weight_gradient, "
    "Tensor[] statistics, Tensor[] state, Tensor(b!) certificate, float? tolerance) -> "
    "(Tensor, Tensor, Tensor)"
)


def head_statistics(
    problem: HeadProblem, request: Request, differentiable: Set[str], weight_gradient: Tensor | None
) -> tuple[RowStatistics, Certificate]:
    """Per-row statistics, differentiable in hidden, weight and bias.

    Args:
        request: what to compute. `keep` holds where anything is differentiated, `jacobian` is decided here.
        differentiable: names of the statistics a gradient may come back through. With the log-probability
            alone and a frozen weight, an exact gradient is prepared by the forward.
        weight_gradient: (V, H), what the backward adds the weight's gradient to in place of returning it.
    """
    parameters = (problem.weight, problem.bias)
    trained = weight_gradient is not None or any(p is not None and p.requires_grad for p in parameters)
    of_hidden = torch.is_grad_enabled() and problem.hidden.requires_grad
    request = request._replace(
        jacobian=of_hidden and not trained and differentiable <= {"logprob"},
        keep=request.keep and (of_hidden or (torch.is_grad_enabled() and trained)),
    )
    results = _head_forward(*problem, *request, weight_gradient)
    return RowStatistics(*results[:_NUM_STATISTICS]), Certificate(results[-1])


def path_of(problem: HeadProblem) -> Path:
    """Which path this problem takes."""
    return _path_on(problem.hidden.device.type, problem.hidden.device.index, problem.hidden.dtype)


@torch.compiler.assume_constant_result
def _path_on(kind: str, index: int | None, dtype: torch.dtype) -> Path:
    """Of a device's facts alone, which a compiler need not trace."""
    return head_path(device_facts(kind, index), dtype)


@torch.library.custom_op("grpo_fast::head_forward", mutates_args=(), schema=_FORWARD)
def _head_forward(*arguments: Any) -> tuple[Tensor, ...]:
    problem, request = _forward_call(arguments)
    check_values(problem)
    device = problem.hidden.device
    plan = _plan_forward(problem, request)
    request = request._replace(jacobian=plan.jacobian)
    with torch.cuda.device_of(problem.hidden), torch.autocast(device.type, enabled=False):
        if plan.path == "triton":
            from grpo_fast.head import accelerated

            statistics, state = accelerated.forward(problem, request, plan)
        else:
            statistics, state = reference.forward(problem, request, plan.chunks)
    if device.type != "cpu":
        statistics.logprob.masked_fill_(problem.targets == ROW_INVALID, torch.nan)
    return (*statistics, *state, Certificate.pending(device).values)


@_head_forward.register_fake
def _head_forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    problem, request = _forward_call(arguments)
    plan = _plan_forward(problem, request, aligned=True)
    if plan.path == "triton":
        from grpo_fast.head import accelerated

        state = accelerated.allocate_state(problem, plan)
    else:
        state = State.empty(problem, jacobian=plan.jacobian)
    certificate = problem.hidden.new_empty(Certificate.SIZE, dtype=torch.float32)
    return (*RowStatistics.allocate(problem, request), *state, certificate)


def _forward_call(arguments: tuple[Any, ...]) -> tuple[HeadProblem, Request]:
    return HeadProblem(*arguments[:_NUM_PROBLEM]), Request(*arguments[_NUM_PROBLEM:-1])


@torch.library.custom_op(
    "grpo_fast::head_backward", mutates_args=("certificate", "weight_gradient"), schema=_BACKWARD
)
def _head_backward(*arguments: Any) -> tuple[Tensor, ...]:
    problem, gradients, wanted = _backward_call(arguments)
    statistics, state, certificate, tolerance = arguments[-4:]
    call = (problem, RowStatistics(*statistics), gradients, wanted)
    state, certificate = State(*state), Certificate(certificate)
    of_entropy, of_mean = gradients.entropy is not None, gradients.mean_logit is not None
    facts = {"entropy_gradient": of_entropy, "mean_gradient": of_mean, "trainable": wanted.weight}
    plan = _plan(problem, tolerance, **facts)
    with torch.cuda.device_of(problem.hidden), torch.autocast(problem.hidden.device.type, enabled=False):
        if state.jacobian.numel():
            result = scaled_jacobian(problem, gradients, state.jacobian)
            certificate.fill(None)
        elif plan.path == "triton":
            from grpo_fast.head import accelerated

            result = accelerated.backward(*call, state, certificate, plan)
        else:
            result = reference.backward(*call, certificate, plan.chunks, plan.tolerance)
    if wanted.into_weight is not None:
        result = result._replace(weight=None)
    # An operator returns tensors: what was not asked for is empty.
    return tuple(problem.hidden.new_empty(0) if gradient is None else gradient for gradient in result)


def scaled_jacobian(problem: HeadProblem, gradients: RowGradients, jacobian: Tensor) -> HeadGradients:
    """The whole gradient, as the log-probability alone was differentiable, in the hidden states alone."""
    assert gradients.logprob is not None
    upstream = torch.where(problem.targets >= 0, gradients.logprob, 0)[:, None]
    hidden = (jacobian * upstream).masked_fill_(upstream == 0, 0)  # there the jacobian may be NaN
    return HeadGradients(hidden.to(problem.hidden.dtype), None, None)


@_head_backward.register_fake
def _head_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    problem, _, wanted = _backward_call(arguments)
    of_weight = wanted.weight and wanted.into_weight is None

    def like(tensor: Tensor | None, want: bool) -> Tensor:
        return tensor.new_empty(tensor.shape) if want and tensor is not None else problem.hidden.new_empty(0)

    asked = (problem.hidden, wanted.hidden), (problem.weight, of_weight), (problem.bias, wanted.bias)
    return tuple(like(tensor, want) for tensor, want in asked)


def _backward_call(arguments: tuple[Any, ...]) -> tuple[HeadProblem, RowGradients, Wanted]:
    gradients = RowGradients(*arguments[_NUM_PROBLEM:_AT_WANTED])
    return HeadProblem(*arguments[:_NUM_PROBLEM]), gradients, Wanted(*arguments[_AT_WANTED:-4])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    problem, request = _forward_call(inputs)
    *kept, ctx.certificate = output
    # Not saved for backward: another head's backward may add to it in between, which saved tensors forbid.
    ctx.weight_gradient = inputs[-1]
    ctx.constants, ctx.tolerance = (problem.logit_scale, problem.softcap), request.tolerance
    ctx.save_for_backward(*problem[:5], *kept)
    ctx.mark_non_differentiable(*output[_NUM_DIFFERENTIABLE:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors, kept = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    want_hidden, want_weight, _, want_bias, *others = ctx.needs_input_grad
    into_weight = ctx.weight_gradient
    of_hidden, of_weight, of_bias = _head_backward(
        *HeadProblem(*tensors, *ctx.constants),
        *gradients[:_NUM_DIFFERENTIABLE],
        *(want_hidden, want_weight or into_weight is not None, want_bias, into_weight),
        *(list(kept[:_NUM_STATISTICS]), list(kept[_NUM_STATISTICS:]), ctx.certificate, ctx.tolerance),
    )
    return (
        of_hidden if want_hidden else None,
        of_weight if want_weight and into_weight is None else None,
        None,
        of_bias if want_bias else None,
        *(None for _ in others),
    )


_head_forward.register_autograd(_backward, setup_context=_setup_context)


def _plan_forward(problem: HeadProblem, request: Request, *, aligned: bool | None = None) -> HeadPlan:
    facts = {"extra_statistics": request.extra_statistics, "keep": request.keep, "jacobian": request.jacobian}
    return _plan(problem, request.tolerance, aligned=aligned, **facts)


def _plan(
    problem: HeadProblem, tolerance: float | None, *, aligned: bool | None = None, **facts: Any
) -> HeadPlan:
    """The plan, with facts of the call named as `Workload` names them; `aligned` is read off the weight."""
    (rows, depth), device = problem.hidden.shape, problem.hidden.device
    work = Workload(
        rows=rows,
        vocabulary=problem.vocabulary,
        dtype=problem.hidden.dtype,
        softcap=problem.softcap is not None,
        tolerance=tolerance,
        hidden_size=depth,
        aligned=_fits_descriptors(problem.weight) if aligned is None else aligned,
        **facts,
    )
    return plan_head(device_facts(device.type, device.index), work)


def _fits_descriptors(weight: Tensor) -> bool:
    """Whether tensor descriptors can address the operands. Hidden states reach the kernels contiguous."""
    itemsize = weight.element_size()
    row = weight.stride(0) if weight.stride(1) == 1 else weight.shape[1]
    aligned = all(length * itemsize % 16 == 0 for length in (row, weight.shape[1]))
    return aligned and weight.data_ptr() % 16 == 0


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
