"""The oracle: what every implementation should return, by autograd in float64, or float32 on small GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import Outcome, Problem, loss_of

_CHUNK = 512  # rows of logits at a time
LIMITS = dict.fromkeys(("logprob", "loss", "hidden_gradient", "weight_gradient"), 0.1)
"""Nats, an absolute error, and two relative ones of Frobenius norms. What is beyond is wrong, not rounded:
bfloat16 logits cost 3e-2 nats and 4e-2."""


OUR_LIMITS = {"logprob": 1e-4, "loss": 1e-3, "hidden_gradient": 8e-3, "weight_gradient": 8e-3}
"""Gradients: several times what their rounding to half precision and the default tolerance cost together."""


class Wrong(Exception):
    """Raised where an implementation gives a wrong result: its time means nothing."""


def require_right(errors: Mapping[str, float], limits: Mapping[str, float]) -> None:
    """Raise Wrong where an error is beyond its limit, or NaN."""
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    if wrong:
        raise Wrong(", ".join(f"{name.replace('_', ' ')} off by {of:.1e}" for name, of in wrong.items()))


@dataclass(frozen=True)
class Oracle:
    """Exact results of one problem."""

    logprobs: Tensor  # (N,)
    loss: Tensor  # ()
    gradients: dict[str, Tensor]  # of "hidden" (N, H) and "weight" (V, H), where the problem asks for them

    def judge(self, problem: Problem, outcome: Outcome) -> dict[str, float]:
        """Return errors by the names of `LIMITS`; raise ValueError where a result is missing or misshapen."""
        errors, found = {}, outcome.logprobs
        if found is not None:
            if found.shape != self.logprobs.shape:
                shape = tuple(found.shape)
                raise ValueError(f"log-probabilities of shape {shape} for {len(self.logprobs)} tokens")
            # A value above zero is wrong by at least as much.
            errors["logprob"] = _largest(torch.stack([found - self.logprobs, found.clamp_min(0)]))
        for name, exact in self.gradients.items():
            gradient = getattr(problem, name).grad
            if gradient is None:
                raise ValueError(f"no gradient arrived in {name}.grad")
            errors[f"{name}_gradient"] = float((gradient.to(exact.dtype) - exact).norm() / exact.norm())
        if outcome.loss is not None:
            errors["loss"] = _largest(outcome.loss - self.loss)
        return errors


def consult(problem: Problem) -> Oracle:
    """Compute the exact results, some rows of logits at a time."""
    dtype, targets = _precision(problem.hidden.device), problem.targets.split(_CHUNK)
    hidden = problem.hidden.detach().to(dtype).requires_grad_(problem.hidden.requires_grad)
    weight = problem.weight.detach().to(dtype).requires_grad_(problem.weight.requires_grad)
    parts = [*zip(hidden.split(_CHUNK), targets, strict=True)]
    logprobs = torch.cat([exact_logprobs(x.detach(), weight.detach(), t) for x, t in parts]).requires_grad_()
    loss = loss_of(problem, logprobs)
    (upstream,) = torch.autograd.grad(loss, logprobs)
    for (x, t), g in zip(parts, upstream.split(_CHUNK), strict=True):
        if problem.backward:
            (exact_logprobs(x, weight, t) * g).sum().backward()
    leaves = {"hidden": hidden, "weight": weight}
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return Oracle(logprobs.detach(), loss.detach(), gradients)


def exact_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities (n,) of the targets, from all logits."""
    return (hidden @ weight.T).log_softmax(1).gather(1, targets[:, None])[:, 0]


def _precision(device: torch.device) -> torch.dtype:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in ((8, 0), (9, 0), (10, 0)):
        return torch.float32
    return torch.float64


def _largest(values: Tensor) -> float:
    """Return NaN where one is not finite."""
    largest = float(values.abs().max())
    return largest if math.isfinite(largest) else math.nan
