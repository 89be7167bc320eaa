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

from grpo_fast.head.call import HeadCall, HeadGradients, Saved, Wanted, schema_of
from grpo_fast.head.outputs import Certificate


def define_operators(
    name: str,
    schema: str,
    call_of: Callable[..., Any],
    results_type: Any,
    gradients_type: Any,
    *,
    forward: Callable[[Any], tuple[Any, Saved]],
    allocate: Callable[[Any], tuple[Any, Saved]],
    backward: Callable[[Any, Any, Saved, Any, Wanted, Certificate], HeadGradients],
) -> Callable[..., tuple[Tensor, ...]]:
    """Define `grpo_fast::NAME_forward` and `grpo_fast::NAME_backward`.

    Args:
        name: of the operators.
        schema: of the arguments, which begin with the fields of the `HeadCall` that is differentiated.
        call_of: makes a call from the arguments.
        results_type: per-row results.
        gradients_type: upstream gradients of the first results.
        forward: computes results and saved tensors.
        allocate: the same, not filled.
        backward: computes gradients and fills the certificate.

    Returns:
        The forward. It returns the results, the saved tensors and the certificate's values.
    """
    num_results, num_gradients = len(results_type._fields), len(gradients_type._fields)
    num_call, in_place = schema.count(",") + 1, HeadCall._fields.index("weight_grad")
    returned = ", ".join(["Tensor"] * (num_results + len(Saved._fields) + 1))
    tags = (torch.Tag.cudagraph_unsafe,)

    @torch.library.custom_op(
        f"grpo_fast::{name}_forward", mutates_args=(), schema=f"({schema}) -> ({returned})", tags=tags
    )
    def run_forward(*arguments: Any) -> tuple[Tensor, ...]:
        with _on_device_of(arguments[0]):
            results, saved = forward(call_of(*arguments))
        return (*results, *saved, Certificate.pending(arguments[0].device).values)

    @run_forward.register_fake
    def _(*arguments: Any) -> tuple[Tensor, ...]:
        results, saved = allocate(call_of(*arguments))
        return (*results, *saved, _empty_certificate(arguments[0]))

    def unpack(arguments: tuple[Any, ...]) -> tuple[HeadCall, Wanted, Any, Saved, Any]:
        head, others = HeadCall(*arguments[: len(HeadCall._fields)]), arguments[num_call:]
        hidden, weight, bias, results, saved = others[num_gradients:]
        wanted = Wanted(hidden, weight, bias, into_weight=head.weight_grad)
        gradients = gradients_type(*others[:num_gradients])
        return head, wanted, results_type(*results), Saved(*saved), gradients

    @torch.library.custom_op(
        f"grpo_fast::{name}_backward",
        mutates_args=("weight_grad",),
        schema=f"({schema.replace('Tensor? weight_grad', 'Tensor(a!)? weight_grad', 1)}, "
        f"{schema_of(gradients_type, 'g_')}, bool want_hidden, bool want_weight, bool want_bias, "
        "Tensor[] results, Tensor[] saved) -> (Tensor, Tensor, Tensor, Tensor)",
        tags=tags,
    )
    def run_backward(*arguments: Any) -> tuple[Tensor, ...]:
        head, wanted, results, saved, gradients = unpack(arguments)
        certificate = Certificate.pending(head.hidden.device)
        with _on_device_of(head.hidden):
            if saved.jacobian.numel():
                certificate.fill_exact()
                made = scaled_jacobian(head, gradients[0], saved.jacobian)
            else:
                call = call_of(*arguments[:num_call])
                made = backward(call, results, saved, gradients, wanted, certificate)
        if wanted.into_weight is not None:
            made = made._replace(weight=None)
        # An operator returns tensors: a gradient that was not asked for is empty.
        returned = (head.hidden.new_empty(0) if gradient is None else gradient for gradient in made)
        return (*returned, certificate.values)

    @run_backward.register_fake
    def _(*arguments: Any) -> tuple[Tensor, ...]:
        head, wanted, *_ = unpack(arguments)
        of_weight = wanted.weight and wanted.into_weight is None
        asked = (head.hidden, wanted.hidden), (head.weight, of_weight), (head.bias, wanted.bias)

        def like(tensor: Tensor | None, want: bool) -> Tensor:
            return tensor.new_empty(tensor.shape) if want and tensor is not None else head.hidden.new_empty(0)

        return (*(like(tensor, want) for tensor, want in asked), _empty_certificate(head.hidden))

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *kept, ctx.certificate = output
        # Not weight_grad: another head's backward may add to it in between, which saved tensors forbid.
        ctx.places = [i for i, each in enumerate(inputs) if isinstance(each, Tensor) and i != in_place]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places), *kept)
        ctx.inputs = [None if i in ctx.places else each for i, each in enumerate(inputs)]
        # AOTAutograd makes a gradient of zeros for each differentiable result, empty ones too.
        unasked = [result for result in output[:num_gradients] if result.shape != output[0].shape]
        ctx.mark_non_differentiable(*unasked, *output[num_gradients:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative(gradients)
        saved = ctx.saved_tensors  # once: a second read is an error under `torch.utils.checkpoint`
        inputs, kept = list(ctx.inputs), list(saved[len(ctx.places) :])
        for i, tensor in zip(ctx.places, saved, strict=False):
            inputs[i] = tensor
        wants = HeadCall(*ctx.needs_input_grad[: len(HeadCall._fields)])
        adds = inputs[in_place] is not None
        *made, certificate = run_backward(
            *(*inputs, *gradients[:num_gradients], wants.hidden, wants.weight or adds, wants.bias),
            *(kept[:num_results], kept[num_results:]),
        )
        if not torch.compiler.is_compiling():  # AOTAutograd's backward cannot write to a forward's result
            ctx.certificate.copy_(certificate)
        asked = wants.hidden, wants.weight and not adds, wants.bias
        hidden, weight, bias = (part if want else None for part, want in zip(made, asked, strict=True))
        return (hidden, weight, None, bias, *(None for _ in inputs[4:]))

    run_forward.register_autograd(differentiate, setup_context=set_up)
    return run_forward


def scaled_jacobian(call: HeadCall, upstream: Tensor, jacobian: Tensor) -> HeadGradients:
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
