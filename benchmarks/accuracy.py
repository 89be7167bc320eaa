"""The oracle: what every implementation should have returned, in float64, or float32 where that is slow.

Log-probabilities and the hidden gradient are compared on a subset of the rows, the weight gradient on a
subset of the vocabulary that holds targets and others. The loss and its upstream gradient are exact.
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
        found = outcome.logprobs
        if found is not None and found.shape != problem.targets.shape:
            raise ValueError(
                f"log-probabilities of shape {tuple(found.shape)} for {len(problem.targets)} tokens"
            )
        errors = {
            "logprob": _largest(None if found is None else found[self.rows], self.logprobs),
            "hidden_gradient": _gradient_error("hidden", problem.hidden, self.rows, self.hidden_gradient),
            "weight_gradient": _gradient_error("weight", problem.weight, self.columns, self.weight_gradient),
            "loss": _largest(outcome.loss, self.loss),
        }
        return {name: error for name, error in errors.items() if error is not None}


@torch.no_grad()
def consult(problem: Problem) -> Oracle:
    """Computes the exact results, a chunk of the logits at a time."""
    dtype = _precision(problem.hidden.device)
    logprobs, logsumexp = exact_logprobs(problem.hidden, problem.weight, problem.targets, dtype)
    loss, upstream = _loss_and_upstream(problem, logprobs)
    rows = _spread_out(problem.targets.numel(), ROWS, problem.targets.device)
    others = _spread_out(problem.weight.shape[0], COLUMNS // 2, problem.targets.device)
    columns = torch.cat([problem.targets[rows][: COLUMNS // 2], others]).unique()
    hidden_gradient = weight_gradient = None
    if problem.hidden.requires_grad:
        hidden_gradient = _hidden_gradient(problem, rows, logsumexp, upstream, dtype)
    if problem.weight.requires_grad:
        weight_gradient = _weight_gradient(problem, columns, logsumexp, upstream, dtype)
    return Oracle(rows, columns, logprobs[rows], hidden_gradient, weight_gradient, loss)


@torch.no_grad()
def exact_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(N,) log-probabilities of the targets, and (N,) logsumexp of the rows, a chunk at a time."""
    logsumexp = torch.cat([_logsumexp(x.to(dtype), weight) for x in hidden.split(_ROW_CHUNK)])
    target_logits = torch.cat(
        [
            (x.to(dtype) * weight[t].to(dtype)).sum(1)
            for x, t in zip(hidden.split(_ROW_CHUNK), targets.split(_ROW_CHUNK), strict=True)
        ]
    )
    return target_logits - logsumexp, logsumexp


@torch.enable_grad()
def _loss_and_upstream(problem: Problem, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """() the loss, and (N,) its gradient in the log-probabilities."""
    leaf = logprobs.detach().requires_grad_()
    loss = loss_of(problem, leaf)
    (upstream,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), upstream


def _precision(device: torch.device) -> torch.dtype:
    """float64, except on GPUs that have hardly any of it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in ((8, 0), (9, 0), (10, 0)):
        return torch.float32
    return torch.float64


def _logsumexp(x: Tensor, weight: Tensor) -> Tensor:
    parts = [(x @ w.to(x.dtype).T).logsumexp(1) for w in weight.split(_COLUMN_CHUNK)]
    return torch.stack(parts).logsumexp(0)


def _hidden_gradient(
    problem: Problem, rows: Tensor, logsumexp: Tensor, upstream: Tensor, dtype: torch.dtype
) -> Tensor:
    x = problem.hidden[rows].to(dtype)
    total = problem.weight[problem.targets[rows]].to(dtype)
    for part in problem.weight.split(_COLUMN_CHUNK):
        w = part.to(dtype)
        total -= (x @ w.T - logsumexp[rows, None]).exp() @ w
    return total * upstream[rows, None]


def _weight_gradient(
    problem: Problem, columns: Tensor, logsumexp: Tensor, upstream: Tensor, dtype: torch.dtype
) -> Tensor:
    w = problem.weight[columns].to(dtype)
    total = torch.zeros_like(w)
    for start in range(0, problem.targets.numel(), _ROW_CHUNK):
        rows = slice(start, start + _ROW_CHUNK)
        x = problem.hidden[rows].to(dtype)
        onehot = (problem.targets[rows, None] == columns).to(dtype)
        total += ((onehot - (x @ w.T - logsumexp[rows, None]).exp()) * upstream[rows, None]).T @ x
    return total


def _spread_out(size: int, count: int, device: torch.device) -> Tensor:
    """At most `count` indices over the whole range, both ends among them."""
    return torch.linspace(0, size - 1, min(size, count), dtype=torch.float64, device=device).round().long()


def _gradient_error(name: str, leaf: Tensor, index: Tensor, exact: Tensor | None) -> float | None:
    if exact is None:
        return None
    if leaf.grad is None:
        raise ValueError(f"no gradient arrived in {name}.grad")
    return float((leaf.grad[index].to(exact.dtype) - exact).norm() / exact.norm())


def _largest(found: Tensor | None, exact: Tensor) -> float | None:
    if found is None:
        return None
    largest = float((found.to(exact.dtype) - exact).abs().max())
    return largest if math.isfinite(largest) else math.nan
