"""The head's kernels, compiled and loaded before they are needed.

A first step would compile them without a word, and while a CUDA graph is captured none can be loaded.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from grpo_fast.head.api import linear_grpo_loss, linear_logprob
from grpo_fast.head.call import HeadCall
from grpo_fast.head.operator import backend_of
from grpo_fast.head.outputs import HeadParameters
from grpo_fast.objective import GRPOLossConfig

logger = logging.getLogger(__name__)
_ROWS = 16


def warm_up(
    head: HeadParameters,
    *,
    loss: GRPOLossConfig | None = None,
    temperature: float = 1.0,
    weight_grad: torch.dtype | None = None,
    recompute: bool = True,
) -> None:
    """Runs a few rows forward and backward in each way that later calls or a captured graph can go.

    The kernels do not depend on the number of tokens. Nothing happens where no kernel runs. The gradient of a
    trainable weight, (V, H), is made and forgotten: no parameter's own is touched.

    Args:
        head: as later calls have it; its weight is frozen or not.
        loss: of `linear_grpo_loss` with the entropy as a metric, too; None: `linear_logprob` alone.
        weight_grad: dtype of the gradient that backwards will add to; None: they return their own.
        recompute: as later calls have it.
    """
    rows = min(_ROWS, head.weight.shape[0])
    hidden = head.weight[:rows].detach().clone().requires_grad_()
    targets = torch.arange(rows, device=hidden.device)
    if backend_of(HeadCall(hidden, head.weight, targets)) != "triton":
        return
    logger.warning("the head's kernels are compiled, which takes up to a minute the first time")
    began = time.perf_counter()
    weight = head.weight.detach()
    bias = None if head.bias is None else head.bias.detach()
    trained = [hidden]
    if bias is not None and head.bias is not None and head.bias.requires_grad:
        trained.append(bias.requires_grad_())
    into = None
    if head.weight.requires_grad and weight_grad is not None:
        into = torch.zeros_like(weight, dtype=weight_grad)
    elif head.weight.requires_grad:
        trained.append(weight.requires_grad_())
    given = {"temperature": temperature, "weight_grad": into, "recompute": recompute} | head.options
    given |= {"bias": bias}

    def backward(total: Tensor) -> None:
        torch.autograd.grad(total, trained)

    row, ids = torch.zeros(rows, device=hidden.device), torch.zeros_like(targets)
    if loss is None or loss.is_custom:
        backward(linear_logprob(hidden, weight, targets, **given).logprob.sum())
    else:
        loss = replace(loss, max_completion_length=loss.max_completion_length or 1)  # else known at a step
        packed: dict[str, Any] = {"sequence_ids": ids, "group_ids": ids, "num_sequences": 1}
        packed["ref_logprobs"] = row if loss.needs_reference else None
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
    logger.info("the head's kernels were ready after %.1f s", time.perf_counter() - began)
