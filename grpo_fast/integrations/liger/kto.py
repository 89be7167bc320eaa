"""Liger 0.8's fused KTO loss on our head and `grpo_fast.preference`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from grpo_fast.integrations.liger.scored import logit_sums, score
from grpo_fast.objective.pairs import PreferenceInputs, PreferenceLossConfig, preference_loss


class LigerFusedLinearKTOLoss(nn.Module):
    """KTO: single completions, each wanted or not."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta, self.compiled, self.chunk_size = (
            ignore_index,
            beta,
            compiled,
            chunk_size,
        )
        self.use_ref_model, self.average = use_ref_model, average_log_prob

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """
        Args:
            _input: (S, T, H).
            target: (S, T) int64, `ignore_index` where a token does not count.
            preference_labels: (S,) bool, whether a completion is wanted.
            kl: () or (S,) the reference point; None: zero.

        Returns:
            The loss, and sums over the wanted and over the unwanted: log-probabilities, logits, rewards.

        Raises:
            ValueError: no labels.
        """
        if preference_labels is None:
            raise ValueError(
                "preference_labels is None: give a (S,) bool tensor, True for wanted completions"
            )
        wanted = preference_labels.bool()
        logprobs = score(_input, lin_weight, target, bias, self.ignore_index).sequences(self.average)
        base = torch.zeros_like(logprobs)
        if self.use_ref_model:
            with torch.no_grad():
                ref = score(ref_input, ref_weight, target, ref_bias, self.ignore_index)
                base = ref.sequences(self.average)
        rewards = self.beta * (logprobs - base)
        # Scores enter as score − kl only, so a reference point of each completion's own is part of its base.
        shifted = base if kl is None else base + kl
        lengths = torch.ones_like(base)
        loss = preference_loss(
            PreferenceInputs(
                chosen_logprobs=logprobs[wanted],
                rejected_logprobs=logprobs[~wanted],
                chosen_lengths=lengths[wanted],
                rejected_lengths=lengths[~wanted],
                ref_chosen_logprobs=shifted[wanted],
                ref_rejected_logprobs=shifted[~wanted],
                kl=base.new_zeros(()),
            ),
            PreferenceLossConfig("kto", beta=self.beta),
        ).loss
        logits = logit_sums(_input, lin_weight, bias)
        metrics = [
            values[chosen].sum() for values in (logprobs, logits, rewards) for chosen in (wanted, ~wanted)
        ]
        return loss, tuple(metric.detach() for metric in metrics)
