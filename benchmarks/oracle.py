"""Exact results by autograd in float64, or in float32 on GPUs with slow float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import KL, Outcome, Problem, loss_of

_CHUNK = 512  # rows of logits at a time
LIMITS = dict.fromkeys(("logprob", "divergence", "loss", "hidden_gradient", "weight_gradient"), 0.1)
"""Nats twice, an absolute error, and relative ones of Frobenius norms. Rounding stays below: bfloat16 logits
cost 3e-2 nats and 4e-2 of the gradients."""

OUR_LIMITS = dict.fromkeys(("logprob", "divergence"), 1e-4) | {"loss": 1e-3}
OUR_LIMITS |= dict.fromkeys(("hidden_gradient", "weight_gradient"), 8e-3)
"""Gradients: several times the cost of rounding to half precision and of the default tolerance together."""


class Wrong(Exception):
    """Raised where an implementation gives a wrong result."""


def require_right(errors: Mapping[str, float], limits: Mapping[str, float]) -> None:
    """Raise Wrong where an error is above its limit, or NaN."""
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    if wrong:
        raise Wrong(", ".join(f"{name.replace('_', ' ')} off by {of:.1e}" for name, of in wrong.items()))


@dataclass(frozen=True)
class Oracle:
    """Exact results of one problem."""

    values: Tensor  # (N,) log-probabilities or divergences
    loss: Tensor  # ()
    gradients: dict[str, Tensor]  # of "hidden" (N, H) and "weight" (V, H), where the problem asks for them

    def judge(self, problem: Problem, outcome: Outcome) -> dict[str, float]:
        """Return errors by the names of `LIMITS`; raise ValueError where a result is missing or misshapen."""
        errors, found = {}, outcome.values
        if found is not None:
            name, sign = ("divergence", -1) if problem.loss == KL else ("logprob", 1)
            if found.shape != self.values.shape:
                raise ValueError(f"{name} of shape {tuple(found.shape)} for {len(self.values)} tokens")
            # A log-probability above zero, or a divergence below, is wrong by at least as much.
            errors[name] = _largest(torch.stack([found - self.values, (sign * found).clamp_min(0)]))
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
    dtype = _precision(problem.hidden.device)
    hidden = problem.hidden.detach().to(dtype).requires_grad_(problem.hidden.requires_grad)
    weight = problem.weight.detach().to(dtype).requires_grad_(problem.weight.requires_grad)
    ref_weight = None if problem.ref_weight is None else problem.ref_weight.to(dtype)

    def values_of(rows: slice) -> Tensor:
        if problem.loss == KL:
            return exact_divergence(hidden[rows], weight, problem.ref_hidden[rows].to(dtype), ref_weight)
        return exact_logprobs(hidden[rows], weight, problem.targets[rows])

    chunks = [slice(start, start + _CHUNK) for start in range(0, len(hidden), _CHUNK)]
    with torch.no_grad():
        values = torch.cat([values_of(rows) for rows in chunks])
    loss = loss_of(problem, values.requires_grad_())
    (upstream,) = torch.autograd.grad(loss, values)
    for rows in chunks if problem.backward else ():
        (values_of(rows) * upstream[rows]).sum().backward()
    leaves = {"hidden": hidden, "weight": weight}
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return Oracle(values.detach(), loss.detach(), gradients)


def exact_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute the log-probabilities (n,) of the targets from all logits."""
    return (hidden @ weight.T).log_softmax(1).gather(1, targets[:, None])[:, 0]


def exact_divergence(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
    """Compute KL(policy || reference) of each row, (n,), from all logits."""
    log_p, log_q = (hidden @ weight.T).log_softmax(1), (ref_hidden @ ref_weight.T).log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def _precision(device: torch.device) -> torch.dtype:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in ((8, 0), (9, 0), (10, 0)):
        return torch.float32
    return torch.float64


def _largest(values: Tensor) -> float:
    largest = float(values.abs().max())
    return largest if math.isfinite(largest) else math.nan
