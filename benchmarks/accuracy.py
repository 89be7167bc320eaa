"""The oracle: what every implementation should have returned, in float64, or float32 where that is slow.

Log-probabilities and the hidden gradient are compared on a subset of the rows, the weight gradient on a
subset of the vocabulary that holds targets and others. The loss and its upstream gradient are exact. NaN and
infinity are looked for everywhere, and log-probabilities above zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import Outcome, Problem, loss_of

ROWS, COLUMNS = 256, 512
_COLUMN_CHUNK, _ROW_CHUNK = 8192, 4096
LIMITS = {
    "logprob": 0.1,  # largest, nats
    "loss": 0.1,  # absolute
    "hidden_gradient": 0.1,  # relative, Frobenius
    "weight_gradient": 0.1,
}
"""Beyond these an implementation is wrong, not rounded: bf16 logits cost 3e-2 nat and 4e-2."""


def is_wrong(errors: Mapping[str, float]) -> bool:
    """Beyond what rounding explains, NaN included."""
    return any(not error <= LIMITS[name] for name, error in errors.items() if name in LIMITS)


@dataclass(frozen=True)
class Oracle:
    """Exact results of one problem, on the subsets."""

    rows: Tensor  # (R,) int64
    columns: Tensor  # (C,) int64
    logprobs: Tensor  # (R,)
    hidden_gradient: Tensor | None  # (R, H)
    weight_gradient: Tensor | None  # (C, H)
    loss: Tensor  # ()

    def judge(self, problem: Problem, outcome: Outcome) -> dict[str, float]:
        """Errors by name, where there is something to compare: see `LIMITS`.

        Raises:
            ValueError: a result is missing or of another shape.
        """
        errors, found = {}, outcome.logprobs
        if found is not None:
            if found.shape != problem.targets.shape:
                shape = tuple(found.shape)
                raise ValueError(f"log-probabilities of shape {shape} for {len(problem.targets)} tokens")
            # What is above zero is wrong by as much at least; zero times infinity is NaN.
            everywhere = found.clamp_min(0) + 0 * found
            errors["logprob"] = _largest(torch.cat([found[self.rows] - self.logprobs, everywhere]))
        if self.hidden_gradient is not None:
            errors["hidden_gradient"] = _relative("hidden", problem.hidden, self.rows, self.hidden_gradient)
        if self.weight_gradient is not None:
            errors["weight_gradient"] = _relative(
                "weight", problem.weight, self.columns, self.weight_gradient
            )
        if outcome.loss is not None:
            errors["loss"] = _largest(outcome.loss - self.loss)
        return errors


@torch.no_grad()
def consult(problem: Problem) -> Oracle:
    """Computes the exact results, a chunk of the logits at a time."""
    dtype = _precision(problem.hidden.device)
    hidden, weight, targets = problem.hidden, problem.weight, problem.targets
    logprobs, logsumexp = exact_logprobs(hidden, weight, targets, dtype)
    with torch.enable_grad():
        leaf = logprobs.requires_grad_()
        loss = loss_of(problem, leaf)
        (upstream,) = torch.autograd.grad(loss, leaf)
    rows = _spread_out(targets.numel(), ROWS, targets.device)
    others = _spread_out(weight.shape[0], COLUMNS // 2, targets.device)
    columns = torch.cat([targets[rows][: COLUMNS // 2], others]).unique()
    hidden_gradient = weight_gradient = None
    if hidden.requires_grad:
        x, hidden_gradient = hidden[rows].to(dtype), weight[targets[rows]].to(dtype)
        for part in weight.split(_COLUMN_CHUNK):
            w = part.to(dtype)
            hidden_gradient -= (x @ w.T - logsumexp[rows, None]).exp() @ w
        hidden_gradient *= upstream[rows, None]
    if weight.requires_grad:
        w = weight[columns].to(dtype)
        weight_gradient = torch.zeros_like(w)
        per_row = (hidden, targets, logsumexp, upstream)
        for x, t, lse, g in zip(*(of.split(_ROW_CHUNK) for of in per_row), strict=True):
            p = (x.to(dtype) @ w.T - lse[:, None]).exp()
            weight_gradient += (((t[:, None] == columns).to(dtype) - p) * g[:, None]).T @ x.to(dtype)
    return Oracle(rows, columns, logprobs.detach()[rows], hidden_gradient, weight_gradient, loss.detach())


@torch.no_grad()
def exact_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(N,) log-probabilities of the targets, and (N,) logsumexp of the rows, a chunk at a time."""
    logprobs, logsumexps = [], []
    for x, t in zip(hidden.split(_ROW_CHUNK), targets.split(_ROW_CHUNK), strict=True):
        rows = x.to(dtype)
        parts = [(rows @ w.to(dtype).T).logsumexp(1) for w in weight.split(_COLUMN_CHUNK)]
        logsumexps.append(torch.stack(parts).logsumexp(0))
        logprobs.append((rows * weight[t].to(dtype)).sum(1) - logsumexps[-1])
    return torch.cat(logprobs), torch.cat(logsumexps)


def _precision(device: torch.device) -> torch.dtype:
    """float64, except on GPUs that have hardly any of it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in ((8, 0), (9, 0), (10, 0)):
        return torch.float32
    return torch.float64


def _spread_out(size: int, count: int, device: torch.device) -> Tensor:
    """At most `count` indices over the whole range, both ends among them."""
    return torch.linspace(0, size - 1, min(size, count), dtype=torch.float64, device=device).round().long()


def _relative(name: str, leaf: Tensor, index: Tensor, exact: Tensor) -> float:
    if leaf.grad is None:
        raise ValueError(f"no gradient arrived in {name}.grad")
    if not leaf.grad.isfinite().all():
        return math.nan
    return float((leaf.grad[index].to(exact.dtype) - exact).norm() / exact.norm())


def _largest(values: Tensor) -> float:
    """NaN where one is not finite."""
    largest = float(values.abs().max())
    return largest if math.isfinite(largest) else math.nan
