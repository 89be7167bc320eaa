"""slime: log-probabilities and entropies from Megatron's hidden states, with vocabulary-parallel weights.

Pass `--custom-megatron-init-path grpo_fast.integrations.slime.patch`: slime calls it in each training actor.
Losses stay slime's. Megatron's output layer then passes hidden states to slime in place of logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from grpo_fast.head import linear_logprob
from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import Replacements

_patch = Replacements()


def patch(args: Any) -> None:
    """Compute slime's log-probabilities by our head. Idempotent.

    Args:
        args: slime's arguments.

    Raises:
        ValueError: an option that reads logits.
    """
    losses = private("slime", "backends.megatron_utils.loss")
    from megatron.core.models.gpt import gpt_model
    from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region

    if args.rollout_top_p != 1:
        raise ValueError(
            f"rollout_top_p = {args.rollout_top_p}: slime masks logits with it, and our head makes none; set "
            "--rollout-top-p 1"
        )
    if args.enable_mtp_training:
        raise ValueError(
            "enable_mtp_training: multi-token prediction reads logits, and our head makes none; leave "
            "--enable-mtp-training out"
        )
    unpatch()
    weights: list[Tensor] = []  # (V / ranks, H) of the last forward

    original = gpt_model.GPTModel.forward

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        layer = getattr(
            self, "output_layer", None
        )  # of the last pipeline stage; a critic's has another class
        if not isinstance(layer, ColumnParallelLinear) or options.get("labels") is not None:
            weights.clear()
            return original(self, *inputs, **options)

        def hand_over(hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
            weights[:] = [layer.weight if weight is None else weight]
            if layer.sequence_parallel:  # linear_logprob sums the gradient over the ranks
                hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
            return hidden, None

        with Replacements() as replacements:
            replacements.replace(layer, "forward", hand_over)
            return original(self, *inputs, **options)

    _patch.replace(gpt_model.GPTModel, "forward", forward)
    theirs = losses.calculate_log_probs_and_entropy
    score = functools.partial(_log_probs_and_entropy, theirs, weights, args.rollout_temperature)
    _patch.replace(losses, "calculate_log_probs_and_entropy", score)


unpatch = _patch.close


def _log_probs_and_entropy(
    theirs: Callable[..., Any],
    weights: list[Tensor],
    temperature: float,
    hidden: Tensor,
    tokens: Tensor,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Replace slime's `calculate_log_probs_and_entropy`.

    Args:
        hidden: (T, H) float32 in place of logits (T, V / ranks), divided by the temperature.
        tokens: (T,) int64.

    Returns:
        Log-probabilities (T, 1) and entropies (T,), float32.
    """
    if not weights or log_prob_keep_mask is not None or not len(hidden):
        options = {"log_prob_keep_mask": log_prob_keep_mask, "with_entropy_grad": with_entropy_grad}
        return theirs(hidden, tokens, tp_group, with_entropy, chunk_size, **options)
    group = tp_group if tp_group is not None and dist.get_world_size(tp_group) > 1 else None
    weight = weights[0]
    out = linear_logprob(
        (hidden * temperature).to(weight.dtype),  # as the model returned it
        weight,
        tokens,
        temperature=temperature,
        process_group=group,
        outputs=("logprob", "entropy") if with_entropy else ("logprob",),
    )
    entropy = out.entropy if out.entropy is None or with_entropy_grad else out.entropy.detach()
    return out.logprob[:, None], entropy
