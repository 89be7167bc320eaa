"""Check, compile and load the head's kernels before they are needed.

Otherwise the first step would compile them without a message, and a CUDA graph under capture can load none.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_fast.head.api import linear_grpo_loss, linear_kl, linear_logprob
from grpo_fast.head.checks import IGNORE_INDEX
from grpo_fast.head.operator import backend_on, kernels_failed, use_kernels
from grpo_fast.head.parameters import HeadParameters
from grpo_fast.head.plan import DEFAULT_TOLERANCE
from grpo_fast.objective import GRPOLossConfig

logger = logging.getLogger(__name__)
_LAUNCHED_ROWS, _CHECKED_ROWS = 16, 64
_PEAK = 2.0  # largest logit of a target in the check, in units of log V
# Rounding moves log-probabilities by 1e-5 of a logit, and gradients in 16 bits by a few thousandths.
_ABSOLUTE, _RELATIVE, _GRADIENT = 1e-3, 1e-4, 0.02


class KernelMismatch(RuntimeError):
    """Raised when kernels and plain torch disagree."""


def warm_up(
    head: HeadParameters,
    *,
    implementation: Literal["auto", "triton", "reference"] = "auto",
    loss: GRPOLossConfig | None = None,
    temperature: float = 1.0,
    weight_grad: torch.dtype | None = None,
    recompute: bool = True,
) -> None:
    """Compare the kernels with plain torch, and compile each kernel that later calls or a captured graph use.

    The kernels do not depend on the number of tokens. Without kernels on the device nothing happens. A
    trainable weight needs temporary memory for its gradient; no parameter's `grad` is touched.

    Args:
        head: as in later calls; its weight is frozen or not.
        implementation: for all heads on the device from now on. auto: kernels, or plain torch with a warning
            if they do not compile, launch or agree; triton: that is an error; reference: plain torch.
        loss: of `linear_grpo_loss` with the entropy as a metric; None: only `linear_logprob` is called.
        weight_grad: dtype of the buffer that backwards add to; None: autograd's gradient.
        recompute: as in later calls.

    Raises:
        RuntimeError: kernels fail or do not exist here, and `implementation` is "triton".
    """
    device = head.weight.device
    if implementation != "auto" or not kernels_failed(device):
        use_kernels(device, implementation != "reference")
    if backend_on(device.type, device.index, head.weight.dtype) != "triton":
        if implementation == "triton":
            raise RuntimeError(f"model.head = 'triton' has no kernels for {device}: set it to auto")
        return
    logger.warning("compiling the head's kernels, which takes up to a minute the first time")
    began = time.perf_counter()
    try:
        check_kernels(head, temperature)
        _launch(head, loss, temperature, weight_grad, recompute)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler raises many types
        problem = f"the head's kernels do not work on {device}: {type(error).__name__}: {error}"
        try:
            torch.zeros(1, device=device).item()
        except RuntimeError:  # no process recovers from an illegal access
            raise RuntimeError(f"{problem}; set model.head = reference and start again") from error
        if implementation == "triton":
            raise RuntimeError(f"{problem}; with model.head = auto plain torch replaces them") from error
        use_kernels(device, False, failed=True)
        logger.warning("model.head = reference is used instead, which is slower; %s", problem)
    else:
        logger.info("the head's kernels were ready after %.1f s", time.perf_counter() - began)


def check_kernels(head: HeadParameters, temperature: float = 1.0) -> None:
    """Compare statistics and gradients of random rows with plain torch, at tolerance 0 and at the head's.

    It finds gross errors. Some rows are flat and some are peaked, so that the sampled backward leaves out
    pairs. Kernels must run on the head's device. A trainable weight takes a temporary (V, H) float32.

    Raises:
        KernelMismatch: they differ by more than rounding explains.
    """
    weight, options = head.weight.detach(), head.options | {"temperature": temperature}
    random: Any = {"generator": torch.Generator(weight.device).manual_seed(0), "device": weight.device}
    targets = torch.randint(weight.shape[0], (_CHECKED_ROWS,), **random)
    toward = weight[targets].float()
    toward /= toward.square().sum(1, keepdim=True).clamp(min=1e-12)
    peak = torch.linspace(0, _PEAK * math.log(weight.shape[0]), _CHECKED_ROWS, device=weight.device)
    hidden = 0.5 * torch.randn(_CHECKED_ROWS, weight.shape[1], **random) + peak[:, None] * toward
    trained = {"hidden": hidden.to(weight.dtype).requires_grad_()}
    targets[0] = IGNORE_INDEX
    if head.bias is not None:
        options["bias"] = head.bias.detach().requires_grad_(head.bias.requires_grad)
        trained |= {"bias": options["bias"]} if head.bias.requires_grad else {}
    into = torch.zeros_like(weight, dtype=torch.float32) if head.weight.requires_grad else None

    def results(tolerance: float, sign: float) -> dict[str, Tensor]:
        given = options | {"tolerance": tolerance}
        with torch.no_grad():
            out = linear_logprob(trained["hidden"], weight, targets, outputs=["entropy"], **given)
        logprob = linear_logprob(trained["hidden"], weight, targets, weight_grad=into, **given).logprob
        gradients = torch.autograd.grad(sign * logprob.sum(), list(trained.values()))
        named = {f"gradient of {n}": sign * g.float() for n, g in zip(trained, gradients, strict=True)}
        assert out.entropy is not None
        return {"log-probability": logprob.detach(), "entropy": out.entropy, **named}

    for tolerance in sorted({0.0, DEFAULT_TOLERANCE if head.tolerance is None else head.tolerance}):
        of_kernels = results(tolerance, 1.0)
        of_weight = None if into is None else into.norm(dim=1)
        use_kernels(weight.device, False)
        try:
            of_torch = results(tolerance, -1.0)  # `into` then holds the difference of both
        finally:
            use_kernels(weight.device, True)
        for name, expected in of_torch.items():
            error = (of_kernels[name] - expected).abs()
            if name.startswith("gradient"):
                error, size = (x.reshape(len(x), -1).norm(dim=1) for x in (error, expected))
                _compare_gradient(name, error, size, tolerance)
            else:
                _require(name, error, _ABSOLUTE + _RELATIVE * expected.abs())
        if into is not None and of_weight is not None:
            _compare_gradient("gradient of weight", into.norm(dim=1), of_weight, tolerance)
            into.zero_()


def _compare_gradient(name: str, error: Tensor, size: Tensor, tolerance: float) -> None:
    if tolerance and name != "gradient of hidden":  # a parameter's rows have few of the sampled tiles
        error, size = error.norm(), size.norm()
    _require(name, error, (_GRADIENT + tolerance * 0.01) * (size + size.median()))


def _require(name: str, error: Tensor, allowed: Tensor) -> None:
    if not (error <= allowed).all():  # NaN is not
        worst = (error / allowed).nan_to_num(torch.inf).max()
        raise KernelMismatch(f"the {name} differs from torch's by {worst:.3g} times the error of rounding")


def _launch(
    head: HeadParameters,
    loss: GRPOLossConfig | None,
    temperature: float,
    weight_grad: torch.dtype | None,
    recompute: bool,
) -> None:
    """Run a few rows forward and backward in each way."""
    rows = min(_LAUNCHED_ROWS, head.weight.shape[0])
    weight = head.weight.detach()
    hidden = weight[:rows].clone().requires_grad_()
    targets = torch.arange(rows, device=hidden.device)
    bias = None if head.bias is None else head.bias.detach().requires_grad_(head.bias.requires_grad)
    into = None
    if loss is not None and loss.compares_heads:  # its gradient of the weight is autograd's
        weight_grad = None
    if head.weight.requires_grad and weight_grad is not None:
        into = torch.zeros_like(weight, dtype=weight_grad)
    weight.requires_grad_(head.weight.requires_grad and into is None)
    trained = [leaf for leaf in (hidden, weight, bias) if leaf is not None and leaf.requires_grad]
    options = {"temperature": temperature, **head.options, "bias": bias}
    given = options | {"weight_grad": into, "recompute": recompute}
    reference: dict[str, Any] = {"ref_hidden": hidden.detach(), "ref_weight": weight.detach()}
    reference["ref_bias"] = None if bias is None else bias.detach()

    def backward(total: Tensor) -> None:
        torch.autograd.grad(total, trained)

    if loss is not None and loss.distills:
        pair: dict[str, Any] = options | reference | {"direction": "jsd", "beta": loss.jsd_beta}
        pair |= {"ref_logit_scale": head.logit_scale, "ref_softcap": head.softcap}
        backward(linear_kl(hidden, weight, targets >= 0, **pair).divergence.sum())
    elif loss is None or loss.is_custom:
        backward(linear_logprob(hidden, weight, targets, **given).logprob.sum())
    else:
        loss = replace(loss, max_completion_length=loss.max_completion_length or 1)  # else known at a step
        row, ids = torch.zeros(rows, device=hidden.device), torch.zeros_like(targets)
        packed: dict[str, Any] = {"sequence_ids": ids, "group_ids": ids, "num_sequences": 1}
        if loss.needs_exact_kl:
            packed |= reference
        elif loss.needs_reference:
            packed["ref_logprobs"] = row
        for old, sampler in product((None, row), (row,) if loss.needs_sampler else (None, row)):
            packed |= {"old_logprobs": old, "sampler_logprobs": sampler, "config": loss, "entropy": True}
            backward(linear_grpo_loss(hidden, weight, targets, row + 1, **packed, **given).loss)
    with torch.no_grad():
        for outputs in (["logprob"], ["logprob", "entropy"]):
            linear_logprob(hidden, weight, targets, outputs=outputs, **given)
    # The dense path: of a batch with too many pairs, of a captured graph, and of a frozen weight with the
    # log-sum-exp among the differentiated statistics.
    outputs = ["logprob", "logsumexp", *["entropy"] * (loss is not None and loss.needs_entropy)]
    exact = given | {"tolerance": 0.0, "recompute": True}
    out = linear_logprob(hidden, weight, targets, outputs=outputs, **exact)
    backward(torch.stack([getattr(out, name) for name in outputs]).sum())
