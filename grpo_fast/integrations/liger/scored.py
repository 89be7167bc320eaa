"""Padded sequences under one head, as Liger's preference losses read and report them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.head import linear_logprob


@dataclass(frozen=True)
class Scored:
    """S sequences under one head."""

    tokens: Tensor  # (S, T) log-probabilities, zero where ignored; differentiable
    lengths: Tensor  # (S,) tokens that count

    def sequences(self, average: bool) -> Tensor:
        """(S,): sums over the tokens, or means."""
        return self.tokens.sum(-1) / self.lengths if average else self.tokens.sum(-1)


def score(rows: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int) -> Scored:
    out = linear_logprob(rows, weight.to(rows.dtype), target, bias=bias, ignore_index=ignore_index)
    return Scored(out.logprob, (target != ignore_index).sum(-1))


def logit_sums(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(S,): the sum of every logit of a sequence, ignored tokens included, as Liger reports them.

    A sum of products is one product with the sum, so no logit is needed.
    """
    with torch.no_grad():
        total = rows.float() @ weight.float().sum(0)
        return (total if bias is None else total + bias.float().sum()).sum(-1)
