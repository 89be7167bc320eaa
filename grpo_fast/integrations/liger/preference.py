"""Liger 0.8's fused preference losses on our head and `grpo_fast.objective.pairs`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from grpo_fast.head import linear_logprob
from grpo_fast.objective.comparisons import PREFERENCE_LOSSES
from grpo_fast.objective.pairs import PreferenceInputs, PreferenceLossConfig, preference_loss

Results = tuple[Tensor, tuple[Tensor, ...]]  # the loss, and metrics without gradient
_settings = dataclass(eq=False, repr=False)  # of the classes below: Liger's, in Liger's order


class _PreferenceLoss(nn.Module):
    """Scores of sequences, and the loss of chosen and rejected ones."""

    loss_type: str  # one of `PREFERENCE_LOSSES`
    ignore_index: int
    beta: float
    average_log_prob: bool = True  # compare means over tokens

    def __post_init__(self) -> None:
        super().__init__()

    def _score(
        self, rows: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Differentiable log-probabilities of tokens (S, T), zero where ignored, and of sequences (S,)."""
        out = linear_logprob(rows, weight.to(rows.dtype), target, bias=bias, ignore_index=self.ignore_index)
        sums = out.logprob.sum(-1)
        lengths = (target != self.ignore_index).sum(-1)
        return out.logprob, sums / lengths if self.average_log_prob else sums

    @torch.no_grad()
    def _reference(
        self, rows: Tensor | None, weight: Tensor | None, target: Tensor, bias: Tensor | None
    ) -> Tensor:
        """(S,) log-probabilities by the reference model."""
        if rows is None or weight is None:
            raise ValueError(
                "use_ref_model=True compares with a reference model: give ref_input and ref_weight, or set "
                "it to False"
            )
        return self._score(rows, weight, target, bias)[1]

    def _loss(
        self, chosen: Tensor, rejected: Tensor, base: tuple[Tensor, Tensor], kl: Tensor | None = None
    ) -> Tensor:
        """() without Liger's likelihood term, from log-probabilities and the reference model's."""
        if self.loss_type in DPO_VARIANTS:
            rewards = self.beta * (chosen - base[0]), self.beta * (rejected - base[1])
            return DPO_VARIANTS[self.loss_type](*rewards, self).mean()
        wanted = PREFERENCE_LOSSES[self.loss_type].fields
        constants: dict[str, Any] = {name: getattr(self, name) for name in wanted if hasattr(self, name)}
        # Lengths of one where the loss would divide what has been divided.
        lengths = torch.ones_like(chosen), torch.ones_like(rejected)
        inputs = PreferenceInputs(chosen, rejected, *lengths, *base, kl=kl)
        config = PreferenceLossConfig(self.loss_type, beta=self.beta, **constants)
        loss = preference_loss(inputs, config).loss
        # The likelihood is part of ORPO's definition in ours, and a term of its own in Liger's.
        return loss + chosen.mean() if self.loss_type == "orpo" else loss


@torch.no_grad()
def _logit_sums(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(S,): the sum of every logit of a sequence, ignored tokens included, as Liger reports them.

    A sum of products is one product with the sum, so no logit is needed.
    """
    total = rows.float() @ weight.float().sum(0)
    return (total if bias is None else total + bias.float().sum()).sum(-1)


class _PairedLoss(_PreferenceLoss):
    """The first half of a batch is chosen, the second rejected."""

    compute_nll_loss: bool
    alpha: float = 1.0  # weight of the chosen completions' negative log-likelihood
    use_ref_model: bool = False

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        *,
        nll_target: Tensor | None = None,
    ) -> Results:
        """
        Args:
            lin_weight: (V, H).
            _input: (2 B, T, H), chosen first.
            target: (2 B, T) int64, `ignore_index` where a token does not count.
            ref_input: (2 B, T, H), with `ref_weight` and `ref_bias`; needed with `use_ref_model`.
            nll_target: (2 B, T) labels of the likelihood term; None: `target`.

        Returns:
            The loss, and: chosen and rejected log-probabilities (B,), their mean logits (), the negative
            log-likelihood (), chosen and rejected rewards (B,).

        Raises:
            ValueError: no reference model where one is to be used.
        """
        tokens, logprobs = self._score(_input, lin_weight, target, bias)
        base = torch.zeros_like(logprobs)
        if self.use_ref_model:
            base = self._reference(ref_input, ref_weight, target, ref_bias)
        (chosen, rejected), (ref_chosen, ref_rejected) = logprobs.chunk(2), base.chunk(2)
        loss = self._loss(chosen, rejected, (ref_chosen, ref_rejected))
        pairs, nll = len(chosen), loss.new_zeros(())
        if self.compute_nll_loss:
            labels = (target if nll_target is None else nll_target)[:pairs]
            if nll_target is not None:
                tokens, _ = self._score(_input[:pairs], lin_weight, labels, bias)
            nll = -tokens[:pairs].sum() / (labels != self.ignore_index).sum()
        logits = _logit_sums(_input, lin_weight, bias) / (target.numel() // 2 * len(lin_weight))
        rewards = (self.beta * (logprobs - base)).chunk(2)
        metrics = (chosen, rejected, logits[:pairs].sum(), logits[pairs:].sum(), nll, *rewards)
        return loss + self.alpha * nll, tuple(metric.detach() for metric in metrics)


@_settings
class LigerFusedLinearDPOLoss(_PairedLoss):
    """DPO and its variants.

    Raises:
        ValueError: an unknown loss, or a smoothing out of its range.
    """

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    compute_nll_loss: bool = False
    compiled: bool = True
    use_ref_model: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1
    loss_type: str = "sigmoid"  # or hinge, robust, or one of `DPO_VARIANTS`
    label_smoothing: float = 0.0  # read by robust, in [0, 0.5), and by exo_pair, above 0 and below 1
    discopop_tau: float = 0.05  # temperature of discopop's modulation

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, smoothing = self.loss_type, self.label_smoothing
        if kind not in (known := ("sigmoid", "hinge", "robust", *DPO_VARIANTS)):
            raise ValueError(f"Unsupported loss_type: {kind!r}; choose one of {', '.join(known)}")
        if kind == "exo_pair" and not 0 < smoothing < 1:
            raise ValueError(
                "label_smoothing must be > 0 for loss_type='exo_pair' and below 1, 1e-3 in its paper, got "
                f"{smoothing}"
            )
        if kind == "robust" and not 0 <= smoothing < 0.5:
            raise ValueError(
                f"label_smoothing must lie in [0.0, 0.5) for loss_type='robust', got {smoothing}"
            )


@_settings
class LigerFusedLinearORPOLoss(_PairedLoss):
    """ORPO: negative log-likelihood of the chosen, and beta times the odds-ratio term."""

    loss_type = "orpo"

    ignore_index: int = -100
    beta: float = 0.1
    compute_nll_loss: bool = True
    compiled: bool = True
    chunk_size: int = 1

    def forward(  # type: ignore[override]
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> Results:
        """As `LigerFusedLinearDPOLoss.forward`, with two more metrics: mean log σ(log odds ratio), mean log
        odds ratio.
        """
        loss, metrics = super().forward(lin_weight, _input, target, bias, nll_target=nll_target)
        chosen, rejected = metrics[:2]
        log_odds = chosen - rejected - torch.log(torch.expm1(chosen) / torch.expm1(rejected))
        return loss, (*metrics, logsigmoid(log_odds).mean(), log_odds.mean())


@_settings
class LigerFusedLinearSimPOLoss(_PairedLoss):
    """SimPO."""

    loss_type = "simpo"

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True
    gamma: float = 0.5
    chunk_size: int = 1


@_settings
class LigerFusedLinearCPOLoss(_PairedLoss):
    """CPO."""

    loss_type = "cpo"
    cpo_alpha = 0.0  # the likelihood term is Liger's own

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1


@_settings
class LigerFusedLinearKTOLoss(_PreferenceLoss):
    """KTO: single completions, each wanted or not."""

    loss_type = "kto"

    ignore_index: int = -100
    beta: float = 0.1
    compiled: bool = True
    use_ref_model: bool = False
    average_log_prob: bool = False
    chunk_size: int = 1

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
    ) -> Results:
        """
        Args:
            _input: (S, T, H).
            target: (S, T) int64, `ignore_index` where a token does not count.
            preference_labels: (S,) bool, whether a completion is wanted.
            kl: () or (S,) the reference point; None: zero.

        Returns:
            The loss, and sums over the wanted and over the unwanted: log-probabilities, logits, rewards.

        Raises:
            ValueError: no labels, or no reference model where one is to be used.
        """
        if preference_labels is None:
            raise ValueError(
                "preference_labels is None: give a (S,) bool tensor, True for wanted completions"
            )
        wanted = preference_labels.bool()
        _, logprobs = self._score(_input, lin_weight, target, bias)
        base = torch.zeros_like(logprobs)
        if self.use_ref_model:
            base = self._reference(ref_input, ref_weight, target, ref_bias)
        # Scores enter as score − kl only, so a reference point of each completion's own is part of its base.
        shifted = base if kl is None else base + kl
        references = shifted[wanted], shifted[~wanted]
        loss = self._loss(logprobs[wanted], logprobs[~wanted], references, kl=base.new_zeros(()))
        reported = (logprobs, _logit_sums(_input, lin_weight, bias), self.beta * (logprobs - base))
        return loss, tuple(values[of].sum().detach() for values in reported for of in (wanted, ~wanted))


# -------------------------------------------------------------------------------------------------------
# DPO variants that Liger offers and `objective.pairs` does not: functions of a pair's two rewards (B,)
# and the module that holds the constants.
# A reward is β (log π_θ(y|x) − log π_ref(y|x)).


def _exo_pair(chosen: Tensor, rejected: Tensor, loss: Any) -> Tensor:
    """KL from the policy's preference to the smoothed label."""
    log_wins, log_loses = logsigmoid(chosen - rejected), logsigmoid(rejected - chosen)
    of_label, of_other = math.log1p(-loss.label_smoothing), math.log(loss.label_smoothing)
    return log_wins.exp() * (log_wins - of_label) + log_loses.exp() * (log_loses - of_other)


def _discopop(chosen: Tensor, rejected: Tensor, loss: Any) -> Tensor:
    """The logistic loss and the exponential one, blended."""
    margin = chosen - rejected
    blend = torch.sigmoid(margin / loss.discopop_tau)
    return -logsigmoid(margin) * (1 - blend) + torch.exp(-margin) * blend


DPO_VARIANTS: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    # EXO, arXiv 2402.00856, eq. 16
    "exo_pair": _exo_pair,
    # NCA, arXiv 2402.05369, for pairs
    "nca_pair": lambda w, l, _: -logsigmoid(w) - 0.5 * (logsigmoid(-w) + logsigmoid(-l)),
    # BCO, arXiv 2404.04656, without its reward shift
    "bco_pair": lambda w, l, _: -logsigmoid(w) - logsigmoid(-l),
    # SPPO, arXiv 2405.00675, eq. 4.7, with the winner's probability one
    "sppo_hard": lambda w, l, loss: ((w - 0.5) / loss.beta).square() + ((l + 0.5) / loss.beta).square(),
    # APO, arXiv 2408.06266, eq. 7 and 8
    "apo_zero": lambda w, l, _: torch.sigmoid(-w) + torch.sigmoid(l),
    "apo_down": lambda w, l, _: torch.sigmoid(w) + torch.sigmoid(l - w),
    # DiscoPOP, arXiv 2406.08414, eq. 5
    "discopop": _discopop,
}
