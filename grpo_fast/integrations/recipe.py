"""TRL's and Liger's words for a policy loss, as ours."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from grpo_fast.objective import GRPOLossConfig, LossInputs, StepTotals, policy_loss
from grpo_fast.objective.catalog import CATALOG
from grpo_fast.objective.loss import kl_estimate
from grpo_fast.objective.types import Segments, step_totals, token_weights

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@dataclass(frozen=True)
class Recipe:
    """A loss of ours, and the one term that TRL and Liger define in another way."""

    config: GRPOLossConfig
    sequence_kl: float = 0.0  # weight of a KL term beside the config's, see `loss`

    def loss(self, inputs: LossInputs) -> Tensor:
        """(): the policy loss, and `sequence_kl` times the KL.

        That KL weighs each token with the importance ratio of its sequence; DeepSeek-V3.2, and `objective`,
        take the token's own.
        """
        loss = policy_loss(inputs, self.config).loss
        if not self.sequence_kl:
            return loss
        mask, old = inputs.loss_mask, inputs.old_logprobs
        segments = Segments.of(inputs.sequence_ids, mask, inputs.num_sequences, inputs.logprobs.dtype)
        log_ratio = inputs.logprobs - (inputs.logprobs.detach() if old is None else old)
        ratio = segments.spread(segments.mean(log_ratio)).exp()
        totals: StepTotals = inputs.totals or step_totals(mask, inputs.num_sequences)
        facts, length = self.config.facts, self.config.max_completion_length
        weights = token_weights(facts.aggregation, segments, totals, length)
        kl = kl_estimate(inputs.logprobs, inputs.ref_logprobs, "k3")
        return loss + self.sequence_kl * (weights * ratio * kl).sum()


def loss_recipe(
    loss_type: str,
    importance_sampling_level: str,
    *,
    beta: float,
    max_completion_length: int | None,
    use_bias_correction_kl: bool = False,
    top_entropy_quantile: float = 1.0,
    off_policy_mask_threshold: float | None = None,
    **constants: float | None,
) -> Recipe:
    """The recipe of one of `LOSS_TYPES`.

    Args:
        importance_sampling_level: "token" or "sequence".
        constants: all that the trainer knows (epsilon_low, delta, vespo_k_pos, ...); a loss takes its own.

    Raises:
        ValueError: an unknown loss, or a combination that we do not compute.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type = {loss_type!r} is unknown; choose one of {', '.join(LOSS_TYPES)}")
    sequence_kl = 0.0
    if use_bias_correction_kl and importance_sampling_level == "sequence":
        sequence_kl, beta, use_bias_correction_kl = beta, 0.0, False
    if (loss_type, importance_sampling_level) == ("luspo", "token"):
        # The sum over a sequence, averaged over sequences, is Dr. GRPO's with a constant length of one.
        loss_type, max_completion_length = "dr_grpo", 1
    config = GRPOLossConfig(
        loss_type,
        importance_sampling_level=importance_sampling_level,
        beta=beta,
        max_completion_length=max_completion_length,
        use_bias_correction_kl=use_bias_correction_kl,
        top_entropy_quantile=top_entropy_quantile,
        off_policy_mask_threshold=off_policy_mask_threshold,
        **{name: value for name, value in constants.items() if name in CATALOG[loss_type].fields},
    )
    return Recipe(config, sequence_kl)


def with_ratio(recipe: Recipe, inputs: LossInputs, ratio: Tensor) -> tuple[Recipe, LossInputs]:
    """The loss corrected by a ratio π_old/π_sampler, (N,), that the trainer has bounded already."""
    if recipe.config.loss_type != "vespo":
        # The policy term is proportional to the advantage.
        return recipe, replace(inputs, advantages=inputs.advantages * ratio)
    # Vespo's sequence weight is made of log-ratios: they take the way of the sampler's, past any bound.
    passing = replace(recipe.config, sampler_correction="token_truncate", sampler_clip_max=math.exp(80))
    sampler = inputs.old_logprobs - ratio.log()
    return replace(recipe, config=passing), replace(inputs, sampler_logprobs=sampler)
