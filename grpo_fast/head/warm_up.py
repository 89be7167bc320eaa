"""The head's kernels, checked, compiled and loaded before they are needed.

A first step would compile them without a word, and while a CUDA graph is captured none can be loaded.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_fast.head.api import linear_grpo_loss, linear_kl, linear_logprob
from grpo_fast.head.operator import backend_on, kernels_failed, use_kernels
from grpo_fast.head.parameters import HeadParameters
from grpo_fast.head.self_check import check_kernels
from grpo_fast.objective import GRPOLossConfig

logger = logging.getLogger(__name__)
_ROWS = 16


def warm_up(
    head: HeadParameters,
    *,
    implementation: Literal["auto", "triton", "reference"] = "auto",
    loss: GRPOLossConfig | None = None,
    temperature: float = 1.0,
    weight_grad: torch.dtype | None = None,
    recompute: bool = True,
) -> None:
    """Check the kernels against plain torch, and compile each that later calls or a captured graph launch.

    The kernels do not depend on the number of tokens. Nothing happens where no kernel runs. The gradient of a
    trainable weight, (V, H), is made and forgotten: no parameter's own is touched.

    Args:
        head: as later calls have it; its weight is frozen or not.
        implementation: of all heads on its device from now on. auto: kernels, and plain torch with a warning
            where they do not compile, launch or agree, also in later calls; triton: that is an error;
            reference: plain torch.
        loss: of `linear_grpo_loss` with the entropy as a metric, too; None: `linear_logprob` alone.
        weight_grad: dtype of the gradient that backwards will add to; None: they return their own.
        recompute: as later calls have it.

    Raises:
        RuntimeError: kernels fail, or none runs here, and `implementation` is "triton".
    """
    device = head.weight.device
    if implementation != "auto" or not kernels_failed(device):
        use_kernels(device, implementation != "reference")
    if backend_on(device.type, device.index, head.weight.dtype) != "triton":
        if implementation == "triton":
            raise RuntimeError(f"model.head = 'triton' has no kernels for {device}: set it to auto")
        return
    logger.warning("the head's kernels are compiled, which takes up to a minute the first time")
    began = time.perf_counter()
    try:
        check_kernels(head, temperature)
        _launch(head, loss, temperature, weight_grad, recompute)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler raises all sorts of things
        problem = f"the head's kernels do not work on {device}: {type(error).__name__}: {error}"
        try:
            torch.zeros(1, device=device).item()
        except RuntimeError:  # of an illegal access no process recovers
            raise RuntimeError(f"{problem}; set model.head = reference and start again") from error
        if implementation == "triton":
            raise RuntimeError(f"{problem}; with model.head = auto plain torch replaces them") from error
        use_kernels(device, False, failed=True)
        logger.warning("model.head = reference is chosen, which is slower; %s", problem)
    else:
        logger.info("the head's kernels were ready after %.1f s", time.perf_counter() - began)


def _launch(
    head: HeadParameters,
    loss: GRPOLossConfig | None,
    temperature: float,
    weight_grad: torch.dtype | None,
    recompute: bool,
) -> None:
    """Run a few rows forward and backward in each way."""
    rows = min(_ROWS, head.weight.shape[0])
    hidden = head.weight[:rows].detach().clone().requires_grad_()
    targets = torch.arange(rows, device=hidden.device)
    weight = head.weight.detach()
    bias = None if head.bias is None else head.bias.detach()
    trained = [hidden]
    if bias is not None and head.bias is not None and head.bias.requires_grad:
        trained.append(bias.requires_grad_())
    into = None
    if loss is not None and loss.compares_heads:  # whose gradient of the weight is autograd's
        weight_grad = None
    if head.weight.requires_grad and weight_grad is not None:
        into = torch.zeros_like(weight, dtype=weight_grad)
    elif head.weight.requires_grad:
        trained.append(weight.requires_grad_())
    given = {"temperature": temperature, "weight_grad": into, "recompute": recompute} | head.options
    given |= {"bias": bias}

    def backward(total: Tensor) -> None:
        torch.autograd.grad(total, trained)

    row, ids = torch.zeros(rows, device=hidden.device), torch.zeros_like(targets)
    of_reference: dict[str, Any] = {"ref_hidden": hidden.detach(), "ref_weight": weight.detach()}
    of_reference["ref_bias"] = None if bias is None else bias.detach()
    if loss is not None and loss.distills:
        pair: dict[str, Any] = {"temperature": temperature, **head.options, "bias": bias, **of_reference}
        pair |= {"ref_logit_scale": head.logit_scale, "ref_softcap": head.softcap, "direction": "jsd"}
        backward(linear_kl(hidden, weight, targets >= 0, beta=loss.jsd_beta, **pair).divergence.sum())
    elif loss is None or loss.is_custom:
        backward(linear_logprob(hidden, weight, targets, **given).logprob.sum())
    else:
        loss = replace(loss, max_completion_length=loss.max_completion_length or 1)  # else known at a step
        packed: dict[str, Any] = {"sequence_ids": ids, "group_ids": ids, "num_sequences": 1}
        if loss.needs_exact_kl:
            packed |= of_reference
        elif loss.needs_reference:
            packed["ref_logprobs"] = row
        for old, sampler in product((None, row), (row,) if loss.needs_sampler else (None, row)):
            packed |= {"old_logprobs": old, "sampler_logprobs": sampler}
            found = linear_grpo_loss(
                hidden, weight, targets, row + 1, config=loss, entropy=True, **packed, **given
            )
            backward(found.loss)
    with torch.no_grad():
        for outputs in (["logprob"], ["logprob", "entropy"]):
            linear_logprob(hidden, weight, targets, outputs=outputs, **given)
    # A batch with too many pairs, or a captured graph, takes the dense path; and with the log-sum-exp among
    # what is differentiated a frozen weight does.
    outputs = ["logprob", "logsumexp", *["entropy"] * (loss is not None and loss.needs_entropy)]
    exact = given | {"tolerance": 0.0, "recompute": True}
    out = linear_logprob(hidden, weight, targets, outputs=outputs, **exact)
    backward(torch.stack([getattr(out, name) for name in outputs]).sum())
