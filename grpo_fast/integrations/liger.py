"""Liger 0.8's `LigerFusedLinearGRPOLoss` on our head and our surrogates: change the import, keep the call.

Metrics are returned in Liger's order, without gradient. `compiled` and `chunk_size` have no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_fast.head import linear_logprob
from grpo_fast.integrations.losses import LOSS_CONSTANTS, TOKEN_MEANS, live_values, shared_config
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.objective.loss import token_terms
from grpo_fast.objective.surrogates import PolicyTokens, log_importance
from grpo_fast.objective.types import Segments, token_weights

__all__ = ["LigerFusedLinearGRPOLoss"]
_REMOVED = tuple(f"LigerFusedLinear{name}Loss" for name in ("CPO", "DPO", "KTO", "ORPO", "SimPO"))


def __getattr__(name: str) -> Any:
    if name in _REMOVED:
        raise ImportError(
            f"grpo_fast.integrations.liger.{name} was removed: import it from liger_kernel.chunked_loss, or "
            "call grpo_fast.linear_logprob and then grpo_fast.objective.pairs.preference_loss"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(eq=False, repr=False)
class LigerFusedLinearGRPOLoss(nn.Module):
    """Policy loss of padded completions, with its metrics: KL, where beta is not 0, and the clipped share.

    Raises:
        ValueError: a temperature or a delta is not positive.
    """

    beta: float = 0.04  # weight of the KL to the reference
    compiled: bool = True
    use_ref_model: bool = True  # False: the KL is zero
    chunk_size: int = 1
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2  # for `cispo` the ceiling itself, above 1
    loss_type: str = "dapo"  # grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo or vespo
    max_completion_length: int | None = None  # needed by dr_grpo
    importance_sampling_level: Literal["token", "sequence"] = "token"  # token for cispo, sapo and vespo
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None  # ceiling of the ratio where the advantage is negative
    use_bias_correction_kl: bool = False  # KL term times the importance ratio of the level above
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        super().__init__()
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "delta"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the loss () float32 and its metrics.

        Args:
            _input: (B, T, H).
            lin_weight: (V, H).
            selected_token_ids: (B, T) int64.
            attention_mask: (B, T), nonzero where a token counts. The others cost nothing.
            advantages: (B,).
            bias: (V,).
            ref_per_token_logps: (B, T); None: computed from `ref_input` (B, T, H), `ref_weight`, `ref_bias`.
            old_per_token_logps: (B, T); None: exactly on-policy.
            vllm_is_ratio: (B,), (B, 1) or (B, T), multiplies the policy term.
            num_items_in_batch: live tokens of the whole step on all processes, by which dapo, cispo and vespo
                divide. None: those of this micro-batch on all processes.

        Raises:
            ValueError: a combination that is not supported, or a KL without its reference.
        """
        config = self._config()
        mask = attention_mask != 0
        per_token = self.importance_sampling_level == "token" or (self.beta != 0 and self.use_ref_model)
        per_token |= vllm_is_ratio is not None and vllm_is_ratio.shape == mask.shape
        if per_token and self.loss_type == "luspo":
            raise ValueError(
                "loss_type = 'luspo' with token ratios, a KL or a (B, T) vllm_is_ratio averages over padding "
                "in Liger and is not computed here; set importance_sampling_level = 'sequence' and beta = 0, "
                "or import it from liger_kernel.chunked_loss"
            )
        ids = selected_token_ids[mask]
        logprobs = self._logprobs(_input[mask], lin_weight, ids, bias)
        old = logprobs if old_per_token_logps is None else old_per_token_logps[mask]
        segments = Segments.of(mask.nonzero()[:, 0], mask[mask], len(mask), logprobs.dtype)
        ratio, vespo = None, self.loss_type == "vespo"
        if vllm_is_ratio is not None:
            ratio = live_values(vllm_is_ratio, mask)
            if vespo and vllm_is_ratio.shape != mask.shape:
                # vespo multiplies the ratios of its tokens, and a sequence's ratio must count once.
                ratio = ratio.pow(1 / segments.spread(segments.counts))
        tokens = PolicyTokens(
            logprobs=logprobs,
            old_logprobs=old.detach(),
            advantages=live_values(advantages, mask).to(logprobs.dtype),
            segments=segments,
            sampler_weight=ratio if vespo else None,
        )
        reference = None
        if self.beta != 0:
            if not self.use_ref_model:
                reference = logprobs.detach()
            elif ref_per_token_logps is not None:
                reference = ref_per_token_logps[mask].detach()
            elif ref_input is not None and ref_weight is not None:
                reference = self._logprobs(ref_input[mask], ref_weight, ids, ref_bias).detach()
            else:
                raise ValueError(
                    f"beta = {self.beta} weighs a KL to a reference model: give ref_per_token_logps, or "
                    "ref_input and ref_weight, or set use_ref_model=False"
                )
        terms, surrogate, kl = token_terms(
            tokens, config, None, reference, None if vespo else ratio, kl_level=config.ratio_level
        )
        sides = [surrogate.clipped[side] for side in ("low", "high") if side in surrogate.clipped]
        if kl is not None and self.use_bias_correction_kl:
            kl = kl * log_importance(tokens, config.ratio_level).exp()  # as Liger reports it
        metrics = [] if kl is None else [kl.detach()]
        metrics.append(sum(sides, torch.zeros_like(logprobs)))
        totals = StepTotals(self._step_tokens(mask, num_items_in_batch), len(mask))
        length = config.max_completion_length
        weights = token_weights(config.aggregation_kind, segments, totals, length)
        live = mask.sum().clamp(min=1)
        return (weights * terms).sum(), tuple(segments.sum(metric).sum() / live for metric in metrics)

    def _logprobs(self, rows: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.to(rows.dtype)
        return linear_logprob(rows, weight, ids, bias=bias, temperature=self.temperature).logprob

    def _config(self) -> GRPOLossConfig:
        level, kind = self.importance_sampling_level, self.loss_type
        if level == "sequence" and kind in ("cispo", "sapo", "vespo"):
            raise ValueError(
                f"Sequence-level importance sampling is not supported for loss_type={kind!r}; use "
                "importance_sampling_level='token'"
            )
        constants = {name: getattr(self, name) for name in LOSS_CONSTANTS}
        kl = {"beta": self.beta, "use_bias_correction_kl": self.use_bias_correction_kl}
        return shared_config(kind, level, self.max_completion_length, constants, **kl)

    def _step_tokens(self, mask: Tensor, num_items_in_batch: Tensor | float | None) -> float:
        if self.loss_type not in TOKEN_MEANS:
            return float(mask.sum())
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if num_items_in_batch is not None:
            return float(num_items_in_batch) / processes
        items = mask.sum().float()
        if processes > 1:
            dist.all_reduce(items)
        return float(items) / processes
