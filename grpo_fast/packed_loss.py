"""The policy loss of a packed batch: the one place where a batch's fields meet the head's arguments."""

from __future__ import annotations

from torch import Tensor

from grpo_fast.head import GRPOLossOutput, HeadParameters, linear_grpo_loss
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.policy import PackedBatch


def packed_loss(
    head: HeadParameters,
    hidden: Tensor,
    batch: PackedBatch,
    config: GRPOLossConfig | None = None,
    *,
    totals: StepTotals | None = None,
    temperature: float = 1.0,
    weight_grad: Tensor | None = None,
) -> GRPOLossOutput:
    """`linear_grpo_loss` of a micro-batch, entropy among its metrics.

    Args:
        hidden: (N, H), the states that predict `batch.targets`.
        config: which loss; its defaults unless given.
        totals: what the losses of a step's micro-batches are divided by; none: the batch's own counts.
        weight_grad: (V, H), what the backward adds the head's gradient to, of `PolicyOptimizer.gradient_of`;
            none: autograd brings it to the parameter.

    Raises:
        ValueError: as `linear_grpo_loss` does.
    """
    return linear_grpo_loss(
        hidden,
        # Detached: a hook on it is the optimizer's own, which is not needed here.
        head.weight if weight_grad is None else head.weight.detach(),
        batch.targets,
        batch.advantages,
        sequence_ids=batch.sequence_ids,
        num_sequences=batch.num_sequences,
        group_ids=batch.group_ids,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        sampler_logprobs=batch.sampler_logprobs,
        totals=totals,
        config=config or GRPOLossConfig(),
        temperature=temperature,
        entropy=True,
        weight_grad=weight_grad,
        **head.options,
    )
