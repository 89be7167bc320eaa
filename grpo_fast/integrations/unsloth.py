"""Unsloth: the fused log-probabilities of its GRPO, RLOO, DPO, ORPO, CPO and KTO trainers on our head.

Import `unsloth` first, then call `patch()` before the first training step. Losses stay Unsloth's. Unsloth
still scores whole logits with top-k, top-p or min-p in the training log-probabilities, with a float32 head
for vLLM, and with `UNSLOTH_FUSED_LINEAR=0`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast.head import linear_logprob
from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import Replacements, rebind

_patch = Replacements()
_IGNORED = -100
_MODULES = ("unsloth", "Unsloth")  # and the trainers that it writes


def patch() -> None:
    """Compute Unsloth's `fused_linear_logprobs` by `linear_logprob`. Idempotent."""
    theirs = private("unsloth_zoo", "fused_losses.fused_linear").fused_linear_logprobs
    if theirs is fused_linear_logprobs:
        return
    rebind(_MODULES, theirs, fused_linear_logprobs)
    _patch.callback(rebind, _MODULES, fused_linear_logprobs, theirs)


unpatch = _patch.close


def fused_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale_multiply: float = 0.0,
    logit_scale_divide: float = 0.0,
    logit_softcapping: float = 0.0,
    return_entropy: bool = False,
    return_mean_logits: bool = False,
    return_log_sum_sq_probs: bool = False,
    return_is_top1: bool = False,
    entropy_requires_grad: bool | None = True,
    **_: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Replace Unsloth's function of that name. The number of rows per chunk has no effect.

    Args:
        hidden: (..., H).
        weight: (V, H).
        targets: (...) int64. Rows outside [0, V), or where `mask` is 0, return 0.
        logit_scale_multiply, logit_scale_divide, logit_softcapping: of the logits; 0 for none.

    Returns:
        Log-probabilities (...) float32 on the device of `hidden`, then each result that is asked for. The
        mean logit is not divided by the temperature.
    """
    kept = (targets >= 0) & (targets < len(weight))
    if mask is not None:
        kept = kept & (mask != 0).to(kept.device)
    targets = torch.where(kept, targets, _IGNORED).to(weight.device)
    wanted = {
        "entropy": return_entropy,
        "mean_logit": return_mean_logits,
        "log_sum_sq_probs": return_log_sum_sq_probs,
        "argmax_is_target": return_is_top1,
    }
    names = tuple(name for name, asked in wanted.items() if asked)
    out = linear_logprob(
        hidden.to(weight.device),
        weight,
        targets,
        bias=None if bias is None else bias.reshape(-1).to(weight.device),
        temperature=temperature,
        logit_scale=(logit_scale_multiply or 1.0) / (logit_scale_divide or 1.0),
        softcap=logit_softcapping or None,
        ignore_index=_IGNORED,
        outputs=("logprob", *names),
    )
    results = [out.logprob, *(getattr(out, name) for name in names)]
    for position, name in enumerate(names, start=1):
        if name == "mean_logit":
            results[position] = results[position].detach() * temperature
        elif name != "entropy" or entropy_requires_grad is False:
            results[position] = results[position].detach()
    results = [result.to(hidden.device) for result in results]
    return results[0] if len(results) == 1 else tuple(results)
