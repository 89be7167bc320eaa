"""A forward and its backward as two custom operators of torch, with autograd between them.

`torch.compile` sees the operators and not what runs inside. Inductor keeps both out of its CUDA graphs,
because the backward may read a size from the device. The forward returns what it saves for the backward next
to its results, since autograd keeps only an operator's results. Kernels start on the current device, so the
operators make it that of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_fast.head.call import HeadGradients, Wanted, schema_of
from grpo_fast.head.outputs import Certificate


def define_operators(
    name: str,
    call_type: Any,
    results_type: Any,
    saved_type: Any,
    gradients_type: Any,
    *,
    forward: Callable[[Any], tuple[Any, Any]],
    allocate: Callable[[Any], tuple[Any, Any]],
    backward: Callable[[Any, Any, Any, Any, Wanted, Certificate], HeadGradients],
) -> Callable[..., tuple[Tensor, ...]]:
    """Define `grpo_fast::NAME_forward` and `grpo_fast::NAME_backward`.

    Args:
        name: of the operators.
        call_type: tuple of the arguments: hidden, weight, targets, bias, …; those before `logit_scale` are
            tensors that the backward reads.
        results_type: tuple of per-row results.
        saved_type: tuple of tensors that the forward saves for the backward, `jacobian` among them.
        gradients_type: tuple of the upstream gradients of the first results.
        forward: computes (results, saved) of a call.
        allocate: the same, not yet filled.
        backward: computes gradients of (call, results, saved, gradients, wanted, certificate) and fills the
            certificate.

    Returns:
        The forward: it takes the fields of a call and returns the results, the saved tensors and the
        certificate's values.
    """
    num_call, num_results, num_saved, num_gradients = (
        len(kind._fields) for kind in (call_type, results_type, saved_type, gradients_type)
    )
    num_operands = call_type._fields.index("logit_scale")
    schema = schema_of(call_type)
    returned = ", ".join(["Tensor"] * (num_results + num_saved + 1))
    in_place = "weight_grad" in call_type._fields
    tags = (torch.Tag.cudagraph_unsafe,)

    @torch.library.custom_op(
        f"grpo_fast::{name}_forward", mutates_args=(), schema=f"({schema}) -> ({returned})", tags=tags
    )
    def run_forward(*arguments: Any) -> tuple[Tensor, ...]:
        call = call_type(*arguments)
        with _on_device_of(call.hidden):
            results, saved = forward(call)
        return (*results, *saved, Certificate.pending(call.hidden.device).values)

    @run_forward.register_fake
    def _(*arguments: Any) -> tuple[Tensor, ...]:
        call = call_type(*arguments)
        results, saved = allocate(call)
        return (*results, *saved, _empty_certificate(call.hidden))

    def unpack(arguments: tuple[Any, ...]) -> tuple[Any, Any, Any, Any, Wanted]:
        call, others = call_type(*arguments[:num_call]), arguments[num_call:]
        gradients, (*wants, results, saved) = others[:num_gradients], others[num_gradients:]
        wanted = Wanted(*wants, into_weight=call.weight_grad if in_place else None)
        return call, results_type(*results), saved_type(*saved), gradients_type(*gradients), wanted

    @torch.library.custom_op(
        f"grpo_fast::{name}_backward",
        mutates_args=("weight_grad",) if in_place else (),
        schema=f"({schema.replace('Tensor? weight_grad', 'Tensor(a!)? weight_grad')}, "
        f"{schema_of(gradients_type, 'g_')}, bool want_hidden, bool want_weight, bool want_bias, "
        "Tensor[] results, Tensor[] saved) -> (Tensor, Tensor, Tensor, Tensor)",
        tags=tags,
    )
    def run_backward(*arguments: Any) -> tuple[Tensor, ...]:
        call, results, saved, gradients, wanted = unpack(arguments)
        certificate = Certificate.pending(call.hidden.device)
        with _on_device_of(call.hidden):
            if saved.jacobian.numel():
                certificate.fill_exact()
                made = scaled_jacobian(call, gradients[0], saved.jacobian)
            else:
                made = backward(call, results, saved, gradients, wanted, certificate)
        if wanted.into_weight is not None:
            made = made._replace(weight=None)
        # An operator returns tensors: a gradient that was not asked for is empty.
        returned = (call.hidden.new_empty(0) if gradient is None else gradient for gradient in made)
        return (*returned, certificate.values)

    @run_backward.register_fake
    def _(*arguments: Any) -> tuple[Tensor, ...]:
        call, *_, wanted = unpack(arguments)
        of_weight = wanted.weight and wanted.into_weight is None
        asked = (call.hidden, wanted.hidden), (call.weight, of_weight), (call.bias, wanted.bias)
        made = (
            tensor.new_empty(tensor.shape) if want else call.hidden.new_empty(0) for tensor, want in asked
        )
        return (*made, _empty_certificate(call.hidden))

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *kept, ctx.certificate = output
        # With weight_grad, which is not saved for backward: another head's backward may add to it in between,
        # which saved tensors forbid.
        ctx.others = inputs[num_operands:]
        ctx.save_for_backward(*inputs[:num_operands], *kept)
        # AOTAutograd makes a gradient of zeros for each differentiable result, empty ones too.
        unasked = [result for result in output[:num_gradients] if result.shape != output[0].shape]
        ctx.mark_non_differentiable(*unasked, *output[num_gradients:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative(gradients)
        saved = ctx.saved_tensors  # once: a second read is an error under `torch.utils.checkpoint`
        kept = list(saved[num_operands:])
        call, wants = call_type(*saved[:num_operands], *ctx.others), call_type(*ctx.needs_input_grad)
        adds = in_place and call.weight_grad is not None
        *made, certificate = run_backward(
            *(*call, *gradients[:num_gradients], wants.hidden, wants.weight or adds, wants.bias),
            *(kept[:num_results], kept[num_results:]),
        )
        if not torch.compiler.is_compiling():  # AOTAutograd's backward cannot write to a forward's result
            ctx.certificate.copy_(certificate)
        asked = wants.hidden, wants.weight and not adds, wants.bias
        hidden, weight, bias = (part if want else None for part, want in zip(made, asked, strict=True))
        return (hidden, weight, None, bias, *(None for _ in call[4:]))

    run_forward.register_autograd(differentiate, setup_context=set_up)
    return run_forward


def scaled_jacobian(call: Any, upstream: Tensor, jacobian: Tensor) -> HeadGradients:
    """Return the hidden gradient where only the first result and the hidden states are differentiated."""
    upstream = torch.where(call.targets >= 0, upstream, 0)[:, None]
    hidden = (jacobian * upstream).masked_fill_(upstream == 0, 0)  # there the jacobian may be NaN
    return HeadGradients(hidden.to(call.hidden.dtype), None, None)


@contextmanager
def _on_device_of(tensor: Tensor) -> Iterator[None]:
    with torch.cuda.device_of(tensor), torch.autocast(tensor.device.type, enabled=False):
        yield


def _empty_certificate(hidden: Tensor) -> Tensor:
    return hidden.new_empty(Certificate.SIZE, dtype=torch.float32)


def _refuse_second_derivative(gradients: Sequence[Tensor | None]) -> None:
    """Raise NotImplementedError in a backward that is differentiated, or run on a batch of gradients."""
    if torch.is_grad_enabled():
        raise NotImplementedError("the head has first derivatives only: call backward without create_graph")
    if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients):
        raise NotImplementedError(
            "the head has first derivatives of one upstream gradient at a time: leave out "
            "is_grads_batched=True, or vectorize=True"
        )
