"""Divergences of two heads as two opaque operators with autograd between them, as in `operator`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast.head import divergence
from grpo_fast.head.call import HeadGradients, KLCall, RowDivergence, SavedDivergence, Wanted, schema_of
from grpo_fast.head.checks import check_values, of_reference
from grpo_fast.head.operator import backend_on, plan_of, refuse_second_derivative
from grpo_fast.head.outputs import Certificate

_NUM_CALL, _NUM_ROWS = len(KLCall._fields), len(RowDivergence._fields)
_NUM_RESULTS = _NUM_ROWS + len(SavedDivergence._fields)
_NUM_OPERANDS = KLCall._fields.index("logit_scale")  # tensors that a backward reads
_CALL = schema_of(KLCall)


def row_divergence(call: KLCall) -> tuple[RowDivergence, Certificate]:
    """Per-row results, differentiable in the student's hidden states, weight and bias.

    `call.jacobian` says whether the divergence alone is differentiated.
    """
    trained = any(p is not None and p.requires_grad for p in (call.weight, call.bias))
    of_hidden = torch.is_grad_enabled() and call.hidden.requires_grad
    results = _forward(*call._replace(jacobian=call.jacobian and of_hidden and not trained))
    return RowDivergence(*results[:_NUM_ROWS]), Certificate(results[-1])


@torch.library.custom_op(
    "grpo_fast::divergence_forward",
    mutates_args=(),
    schema=f"({_CALL}) -> ({', '.join(['Tensor'] * (_NUM_RESULTS + 1))})",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = KLCall(*arguments)
    device = call.hidden.device
    check_values(call.student)
    of_reference(check_values, call.reference)
    with torch.cuda.device_of(call.hidden), torch.autocast(device.type, enabled=False):
        if _runs_kernels(call):
            from grpo_fast.head import accelerated_divergence

            rows, saved = accelerated_divergence.forward(call, plan_of(call.student))
        else:
            rows, saved = divergence.forward(call)
    return (*rows, *saved, Certificate.pending(device).values)


@_forward.register_fake
def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call = KLCall(*arguments)
    if _runs_kernels(call):
        from grpo_fast.head import accelerated_divergence

        saved = accelerated_divergence.allocate_saved(call, plan_of(call.student, aligned=True))
    else:
        saved = SavedDivergence.empty(call)
    return (*RowDivergence.allocate(call), *saved, call.hidden.new_empty(4, dtype=torch.float32))


@torch.library.custom_op(
    "grpo_fast::divergence_backward",
    mutates_args=(),
    schema=f"({_CALL}, Tensor of_divergence, Tensor? of_logsumexp, Tensor[] kept, bool want_hidden, "
    "bool want_weight, bool want_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    call, wanted = KLCall(*arguments[:_NUM_CALL]), Wanted(*arguments[-3:])
    of_divergence, of_logsumexp, kept = arguments[_NUM_CALL:-3]
    rows, saved = RowDivergence(*kept[:_NUM_ROWS]), SavedDivergence(*kept[_NUM_ROWS:])
    certificate = Certificate.pending(call.hidden.device)
    with torch.cuda.device_of(call.hidden), torch.autocast(call.hidden.device.type, enabled=False):
        certificate.fill_exact()
        if saved.jacobian.numel():
            factor = torch.where(call.mask, of_divergence, 0)[:, None]
            # Where nothing comes back, the jacobian may be NaN.
            scaled = (saved.jacobian * factor).masked_fill_(factor == 0, 0).to(call.hidden.dtype)
            made = HeadGradients(scaled, None, None)
        elif _runs_kernels(call):
            from grpo_fast.head import accelerated_divergence

            made = accelerated_divergence.backward(
                call, rows, of_divergence, of_logsumexp, wanted, saved, certificate, plan_of(call.student)
            )
        else:
            made = divergence.backward(call, rows, of_divergence, of_logsumexp, wanted)
    # An operator returns tensors: what was not asked for is empty.
    return (
        *(call.hidden.new_empty(0) if gradient is None else gradient for gradient in made),
        certificate.values,
    )


@_backward.register_fake
def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call, wants = KLCall(*arguments[:_NUM_CALL]), arguments[-3:]
    operands = (call.hidden, call.weight, call.bias)
    made = (
        tensor.new_empty(tensor.shape if want else 0) if tensor is not None else call.hidden.new_empty(0)
        for tensor, want in zip(operands, wants, strict=True)
    )
    return (*made, call.hidden.new_empty(4, dtype=torch.float32))


def _runs_kernels(call: KLCall) -> bool:
    """The likeliest entries of a row are found among whole logits."""
    sides = (call.hidden, call.ref_hidden)
    backends = {backend_on(t.device.type, t.device.index, t.dtype) for t in sides}
    return backends == {"triton"} and call.topk is None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *kept, ctx.certificate = output
    ctx.others = inputs[_NUM_OPERANDS:]
    ctx.save_for_backward(*inputs[:_NUM_OPERANDS], *kept)
    ctx.mark_non_differentiable(*kept[2:], ctx.certificate)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(gradients)
    saved = ctx.saved_tensors
    operands, kept = saved[:_NUM_OPERANDS], list(saved[_NUM_OPERANDS:])
    call, wants = KLCall(*operands, *ctx.others), KLCall(*ctx.needs_input_grad)
    wanted = wants.hidden, wants.weight, wants.bias
    *made, certificate = _backward(*call, *gradients[:2], kept, *wanted)
    if not torch.compiler.is_compiling():  # AOTAutograd's backward cannot write to a result of its forward
        ctx.certificate.copy_(certificate)
    of_operands = (made if want else None for made, want in zip(made, wanted, strict=True))
    return (*of_operands, *(None for _ in call[3:]))


_forward.register_autograd(_differentiate, setup_context=_setup_context)
