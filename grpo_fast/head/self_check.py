"""The head's kernels compared with plain torch, before a run relies on them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grpo_fast.head.api import linear_logprob
from grpo_fast.head.checks import IGNORE_INDEX
from grpo_fast.head.operator import use_kernels
from grpo_fast.head.parameters import HeadParameters
from grpo_fast.head.plan import DEFAULT_TOLERANCE

_ROWS = 64
_PEAK = 2.0  # logits of the targets, in units of log V, go from zero up to it
# Rounding moves log-probabilities by 1e-5 of a logit, and gradients in 16 bits by a few thousandths.
_ABSOLUTE, _RELATIVE, _GRADIENT = 1e-3, 1e-4, 0.02


class KernelMismatch(RuntimeError):
    """Raised when kernels and plain torch disagree."""


def check_kernels(head: HeadParameters, temperature: float = 1.0) -> None:
    """Compare statistics and gradients of random rows, of the exact backward and of the head's own.

    It finds gross errors. Some rows are flat and some are peaked, so that the sampled backward leaves out
    pairs. Kernels must run on the head's device, and do so afterwards. A trainable weight takes a (V, H)
    float32.

    Raises:
        KernelMismatch: they differ by more than rounding explains.
    """
    weight, options = head.weight.detach(), head.options | {"temperature": temperature}
    random = torch.Generator(weight.device).manual_seed(0)
    like: Any = {"generator": random, "device": weight.device}
    targets = torch.randint(weight.shape[0], (_ROWS,), **like)
    toward = weight[targets].float()
    toward /= toward.square().sum(1, keepdim=True).clamp(min=1e-12)
    peak = torch.linspace(0, _PEAK * math.log(weight.shape[0]), _ROWS, device=weight.device)[:, None]
    hidden = 0.5 * torch.randn(_ROWS, weight.shape[1], **like) + peak * toward
    hidden = hidden.to(weight.dtype).requires_grad_()
    targets[0] = IGNORE_INDEX
    trained = {"hidden": hidden}
    if head.bias is not None:
        options["bias"] = head.bias.detach().requires_grad_(head.bias.requires_grad)
        trained |= {"bias": options["bias"]} if head.bias.requires_grad else {}
    into = torch.zeros_like(weight, dtype=torch.float32) if head.weight.requires_grad else None

    def found(tolerance: float | None, sign: float) -> dict[str, Tensor]:
        given = options | {"tolerance": tolerance}
        with torch.no_grad():
            entropy = linear_logprob(hidden, weight, targets, outputs=["entropy"], **given).entropy
        logprob = linear_logprob(hidden, weight, targets, weight_grad=into, **given).logprob
        gradients = torch.autograd.grad(sign * logprob.sum(), list(trained.values()))
        assert entropy is not None
        named = {f"gradient of {n}": sign * g.float() for n, g in zip(trained, gradients, strict=True)}
        return {"log-probability": logprob.detach(), "entropy": entropy, **named}

    own = DEFAULT_TOLERANCE if head.tolerance is None else head.tolerance
    for tolerance in sorted({0.0, own}):
        kernels = found(tolerance, 1.0)
        before = None if into is None else into.norm(dim=1)
        use_kernels(weight.device, False)
        try:
            torchs = found(tolerance, -1.0)  # the weight's gradient of both is their difference
        finally:
            use_kernels(weight.device, True)
        allowed = _GRADIENT + tolerance * 0.01
        for name, expected in torchs.items():
            error = (kernels[name] - expected).abs()
            if name.startswith("gradient"):
                error, size = (x.reshape(len(x), -1).norm(dim=1) for x in (error, expected))
                if tolerance and name.endswith("bias"):  # its elements have few of the sampled tiles
                    error, size = error.norm(), size.norm()
                _require(name, error, allowed * (size + size.median()))
            else:
                _require(name, error, _ABSOLUTE + _RELATIVE * expected.abs())
        if into is not None and before is not None:
            error = into.norm(dim=1)
            if tolerance:  # rows of the weight have few of the sampled tiles
                error, before = error.norm(), before.norm()
            _require("gradient of weight", error, allowed * (before + before.median()))
            into.zero_()


def _require(name: str, error: Tensor, allowed: Tensor) -> None:
    if not (error <= allowed).all():  # NaN is not
        worst = (error / allowed).nan_to_num(torch.inf).max()
        raise KernelMismatch(f"the {name} differs from torch's by {worst:.3g} times what rounding explains")
