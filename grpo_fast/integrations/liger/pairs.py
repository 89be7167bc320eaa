"""Liger 0.8's fused losses of pairs on our head and `grpo_fast.preference`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from grpo_fast.integrations.liger.dpo_variants import DPO_VARIANTS, Rewards
from grpo_fast.integrations.liger.scored import Scored, logit_sums, score
from grpo_fast.objective.pairs import PreferenceInputs, PreferenceLossConfig, preference_loss

_DPO_LOSSES = ("sigmoid", "hinge", "robust")


class _PairedLoss(nn.Module):
    """What the losses of pairs share. The first half of a batch is chosen, the second rejected."""

    ignore_index: int
    beta: float
    compute_nll_loss: bool
    average: bool  # compare means over tokens
    alpha: float = 1.0

    def _loss(
        self,
        objective: Callable[[PreferenceInputs], Tensor],
        weight: Tensor,
        rows: Tensor,
        target: Tensor,
        bias: Tensor | None,
        reference: Scored | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        scored = score(rows, weight, target, bias, self.ignore_index)
        pairs = target.shape[0] // 2
        chosen, rejected = scored.sequences(self.average).split(pairs)
        zero = torch.zeros_like(chosen)
        of_reference = (zero, zero) if reference is None else reference.sequences(self.average).split(pairs)
        # Lengths of one where the loss would divide what has been divided.
        lengths = torch.ones_like(zero)
        loss = objective(
            PreferenceInputs(
                chosen_logprobs=chosen,
                rejected_logprobs=rejected,
                chosen_lengths=lengths,
                rejected_lengths=lengths,
                ref_chosen_logprobs=of_reference[0],
                ref_rejected_logprobs=of_reference[1],
            )
        )
        log_odds = self._log_odds(chosen, rejected)
        nll = self._nll(scored, weight, rows, target, bias, nll_target)
        sums = logit_sums(rows, weight, bias) / (pairs * target.shape[1] * weight.shape[0])
        chosen_rewards, rejected_rewards = (
            self.beta * (policy - base) for policy, base in zip((chosen, rejected), of_reference, strict=True)
        )
        metrics = (
            chosen,
            rejected,
            sums[:pairs].sum(),
            sums[pairs:].sum(),
            nll,
            chosen_rewards,
            rejected_rewards,
            *log_odds,
        )
        return loss + self.alpha * nll, tuple(metric.detach() for metric in metrics)

    def _nll(
        self,
        scored: Scored,
        weight: Tensor,
        rows: Tensor,
        target: Tensor,
        bias: Tensor | None,
        nll_target: Tensor | None,
    ) -> Tensor:
        """(): mean over the chosen completions' tokens, or those of `nll_target`."""
        pairs = target.shape[0] // 2
        if not self.compute_nll_loss:
            return scored.tokens.new_zeros(())
        if nll_target is not None:
            scored = score(rows[:pairs], weight, nll_target[:pairs], bias, self.ignore_index)
        return -scored.tokens[:pairs].sum() / scored.lengths[:pairs].sum()

    def _log_odds(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
        """Metrics of ORPO alone."""
        return ()


def _mean_of(config: PreferenceLossConfig) -> Callable[[PreferenceInputs], Tensor]:
    return lambda inputs: preference_loss(inputs, config).loss


class LigerFusedLinearDPOLoss(_PairedLoss):
    """DPO and its variants."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
    ) -> None:
        """
        Args:
            alpha: weight of the chosen completions' negative log-likelihood, where `compute_nll_loss`.
            loss_type: sigmoid, hinge, robust, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down or
                discopop.
            label_smoothing: read by robust, in [0, 0.5), and by exo_pair, above 0 and below 1.
            discopop_tau: temperature of discopop's modulation.

        Raises:
            ValueError: an unknown loss, or a smoothing out of its range.
        """
        super().__init__()
        if loss_type not in (*_DPO_LOSSES, *DPO_VARIANTS):
            known = ", ".join((*_DPO_LOSSES, *DPO_VARIANTS))
            raise ValueError(f"Unsupported loss_type: {loss_type!r}; choose one of {known}")
        if loss_type == "exo_pair" and not 0 < label_smoothing < 1:
            raise ValueError(
                "label_smoothing must be > 0 for loss_type='exo_pair' and below 1, 1e-3 in its paper, got "
                f"{label_smoothing}"
            )
        if loss_type == "robust" and not 0 <= label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing must lie in [0.0, 0.5) for loss_type='robust', got {label_smoothing}"
            )
        self.ignore_index, self.beta, self.alpha = ignore_index, beta, alpha
        self.compute_nll_loss, self.compiled, self.chunk_size = compute_nll_loss, compiled, chunk_size
        self.use_ref_model, self.average = use_ref_model, average_log_prob
        self.loss_type, self.label_smoothing, self.discopop_tau = loss_type, label_smoothing, discopop_tau

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """
        Args:
            lin_weight: (V, H).
            _input: (2 B, T, H), chosen first.
            target: (2 B, T) int64, `ignore_index` where a token does not count.
            ref_input: (2 B, T, H), with `ref_weight` and `ref_bias`; needed with `use_ref_model`.

        Returns:
            The loss, and: chosen and rejected log-probabilities (B,), their mean logits (), the negative
            log-likelihood (), chosen and rejected rewards (B,).
        """
        reference = None
        if self.use_ref_model:
            with torch.no_grad():
                reference = score(ref_input, ref_weight, target, ref_bias, self.ignore_index)
        return self._loss(self._objective(), lin_weight, _input, target, bias, reference)

    def _objective(self) -> Callable[[PreferenceInputs], Tensor]:
        if self.loss_type not in DPO_VARIANTS:
            smoothing = self.label_smoothing if self.loss_type == "robust" else 0.0
            return _mean_of(PreferenceLossConfig(self.loss_type, beta=self.beta, label_smoothing=smoothing))
        variant, beta = DPO_VARIANTS[self.loss_type], self.beta

        def mean(inputs: PreferenceInputs) -> Tensor:
            chosen = beta * (inputs.chosen_logprobs - inputs.ref_chosen_logprobs)
            rejected = beta * (inputs.rejected_logprobs - inputs.ref_rejected_logprobs)
            return variant(Rewards(chosen, rejected, beta, self.label_smoothing, self.discopop_tau)).mean()

        return mean


class LigerFusedLinearORPOLoss(_PairedLoss):
    """ORPO: negative log-likelihood of the chosen, and beta times the odds-ratio term."""

    average = True

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta = ignore_index, beta
        self.compute_nll_loss, self.compiled, self.chunk_size = compute_nll_loss, compiled, chunk_size

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `LigerFusedLinearDPOLoss.forward`, with two more metrics: mean log σ(log odds ratio), mean log
        odds ratio.

        Args:
            nll_target: (2 B, T) labels of the likelihood term; None: `target`.
        """
        config = PreferenceLossConfig("orpo", beta=self.beta)

        def odds_ratio_term(inputs: PreferenceInputs) -> Tensor:
            # The likelihood term is Liger's own; ours is part of ORPO's definition.
            return preference_loss(inputs, config).loss + inputs.chosen_logprobs.mean()

        return self._loss(odds_ratio_term, lin_weight, _input, target, bias, nll_target=nll_target)

    def _log_odds(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
        log_odds = chosen - rejected - torch.log(torch.expm1(chosen) / torch.expm1(rejected))
        return logsigmoid(log_odds).mean(), log_odds.mean()


class LigerFusedLinearSimPOLoss(_PairedLoss):
    """SimPO."""

    average = True

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta, self.alpha = ignore_index, beta, alpha
        self.compute_nll_loss, self.compiled, self.chunk_size = compute_nll_loss, compiled, chunk_size
        self.label_smoothing, self.gamma = label_smoothing, gamma

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `LigerFusedLinearDPOLoss.forward`, without a reference."""
        config = PreferenceLossConfig(
            "simpo", beta=self.beta, gamma=self.gamma, label_smoothing=self.label_smoothing
        )
        return self._loss(_mean_of(config), lin_weight, _input, target, bias)


class LigerFusedLinearCPOLoss(_PairedLoss):
    """CPO."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta, self.alpha = ignore_index, beta, alpha
        self.compute_nll_loss, self.compiled, self.chunk_size = compute_nll_loss, compiled, chunk_size
        self.label_smoothing, self.average = label_smoothing, average_log_prob

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `LigerFusedLinearDPOLoss.forward`, without a reference."""
        config = PreferenceLossConfig(
            "cpo", beta=self.beta, label_smoothing=self.label_smoothing, cpo_alpha=0.0
        )
        return self._loss(_mean_of(config), lin_weight, _input, target, bias)
