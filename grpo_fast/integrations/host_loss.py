"""A policy loss by the settings that TRL and Liger share, as a loss of ours."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from grpo_fast.objective import GRPOLossConfig, LossInputs, policy_loss
from grpo_fast.objective.catalog import CATALOG
from grpo_fast.objective.loss import kl_estimate
from grpo_fast.objective.types import Segments, step_totals, token_weights

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
TOKEN_MEANS = ("cispo", "dapo", "vespo")
"""Those that both divide by the tokens of the whole step (bnpo: by the micro-batch's)."""
LOSS_CONSTANTS = frozenset().union(*(CATALOG[name].fields for name in LOSS_TYPES))
"""Fields of `GRPOLossConfig`, called the same by both."""


@dataclass(frozen=True)
class HostLoss:
    """A loss of ours, and the one term that TRL and Liger define in another way."""

    config: GRPOLossConfig
    sequence_kl: float = 0.0  # weight of a KL term beside the config's, see `__call__`

    @classmethod
    def of(
        cls,
        loss_type: str,
        importance_sampling_level: Any,
        *,
        beta: float,
        max_completion_length: int | None,
        use_bias_correction_kl: bool = False,
        top_entropy_quantile: float = 1.0,
        off_policy_mask_threshold: float | None = None,
        **constants: Any,
    ) -> HostLoss:
        """One of `LOSS_TYPES`.

        Args:
            importance_sampling_level: "token" or "sequence".
            constants: all of `LOSS_CONSTANTS`, of which the loss takes its own.

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
        return cls(config, sequence_kl)

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(): the policy loss, and `sequence_kl` times the KL.

        That KL weighs each token with the importance ratio of its sequence; DeepSeek-V3.2, and `objective`,
        take the token's own.
        """
        loss = policy_loss(inputs, self.config).loss
        if not self.sequence_kl:
            return loss
        assert inputs.ref_logprobs is not None, "a KL term comes with a reference's log-probabilities"
        mask, old = inputs.loss_mask, inputs.old_logprobs
        segments = Segments.of(inputs.sequence_ids, mask, inputs.num_sequences, inputs.logprobs.dtype)
        log_ratio = inputs.logprobs - (inputs.logprobs.detach() if old is None else old)
        ratio = segments.spread(segments.mean(log_ratio)).exp()
        totals = inputs.totals or step_totals(mask, inputs.num_sequences)
        facts, length = self.config.facts, self.config.max_completion_length
        weights = token_weights(facts.aggregation, segments, totals, length)
        kl = kl_estimate(inputs.logprobs, inputs.ref_logprobs, "k3")
        return loss + self.sequence_kl * (weights * ratio * kl).sum()

    def with_ratio(self, inputs: LossInputs, ratio: Tensor) -> tuple[HostLoss, LossInputs]:
        """The loss corrected by a ratio π_old/π_sampler, (N,), that the trainer has bounded already."""
        if self.config.loss_type != "vespo":
            # The policy term is proportional to the advantage.
            return self, replace(inputs, advantages=inputs.advantages * ratio)
        # Vespo's sequence weight is made of log-ratios: they take the way of the sampler's, past any bound.
        unbounded = replace(self.config, sampler_correction="token_truncate", sampler_clip_max=math.exp(80))
        assert inputs.old_logprobs is not None, "a ratio to the sampler comes with old log-probabilities"
        sampler = inputs.old_logprobs - ratio.log()
        return replace(self, config=unbounded), replace(inputs, sampler_logprobs=sampler)
