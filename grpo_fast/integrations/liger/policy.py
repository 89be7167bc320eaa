"""`LigerFusedLinearGRPOLoss` of Liger 0.8 on our head and our losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_fast.head import linear_logprob
from grpo_fast.integrations.host_loss import LOSS_CONSTANTS, TOKEN_MEANS, HostLoss
from grpo_fast.integrations.padded import Packing
from grpo_fast.objective import LossInputs
from grpo_fast.objective.loss import kl_estimate
from grpo_fast.objective.surrogates import PolicyTokens, log_importance
from grpo_fast.objective.types import Segments

_UNCLIPPED = ("sapo", "vespo")


@dataclass(eq=False, repr=False)
class LigerFusedLinearGRPOLoss(nn.Module):
    """A policy loss of padded completions and its metrics: KL, where beta is not 0, and the clipped share.

    `luspo` with token ratios, a KL or a (B, T) `vllm_is_ratio` is Liger's mean over every position: padding
    is scored, and what `_input` and the log-probabilities hold there enters the loss. TRL's leaves it out.

    Raises:
        ValueError: a temperature or a delta that is not positive.
    """

    beta: float = 0.04  # weight of the KL to the reference
    compiled: bool = True  # of no effect
    use_ref_model: bool = True  # whether there is a reference; without one the KL is zero
    chunk_size: int = 1  # of no effect
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2  # absolute for `cispo`
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
        """
        Args:
            _input: (B, T, H).
            lin_weight: (V, H).
            selected_token_ids: (B, T) int64.
            attention_mask: (B, T), not zero where a token counts. The others cost nothing, but see `luspo`.
            advantages: (B,).
            bias: (V,).
            ref_per_token_logps: (B, T); None: computed from `ref_input` (B, T, H), `ref_weight`, `ref_bias`.
            old_per_token_logps: (B, T); None: exactly on-policy.
            vllm_is_ratio: (B,), (B, 1) or (B, T), multiplies the policy term.
            num_items_in_batch: live tokens over the whole step and all processes: the normaliser of dapo,
                cispo and vespo. None: those of this micro-batch on all processes.

        Returns:
            () float32 and the metrics.

        Raises:
            ValueError: a combination that is not offered, or a KL without its reference.
        """
        host_loss = self._host_loss()
        packing = Packing.of(attention_mask)
        over_padding = self._averages_padding(attention_mask.shape, vllm_is_ratio)
        scored = Packing.of(torch.ones_like(attention_mask)) if over_padding else packing
        ids = scored.pack(selected_token_ids)
        logprobs = self._logprobs(scored.pack(_input), lin_weight, ids, bias)
        old = scored.constant(old_per_token_logps, logprobs.dtype)
        old = logprobs.detach() if old is None else old
        reference = scored.constant(ref_per_token_logps, logprobs.dtype) if self._has_kl else None
        if self._has_kl and reference is None:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    f"beta = {self.beta} weighs a KL to a reference model: give ref_per_token_logps, or "
                    "ref_input and ref_weight, or set use_ref_model=False"
                )
            with torch.no_grad():
                reference = self._logprobs(scored.pack(ref_input), ref_weight, ids, ref_bias)
        live = packing.index if over_padding else slice(None)
        inputs = packing.loss_inputs(
            logprobs[live],
            packing.spread(advantages).to(logprobs.dtype),
            packing.totals,
            old_logprobs=old[live],
            ref_logprobs=None if reference is None else reference[live],
        )
        metrics = self._metrics(inputs)
        if over_padding:
            shape = packing.mask.shape
            loss = self._luspo_over_padding(
                logprobs.view(shape),
                old.view(shape),
                None if reference is None else reference.view(shape),
                packing.mask,
                advantages,
                vllm_is_ratio,
            )
            return loss, metrics
        if vllm_is_ratio is not None:
            host_loss, inputs = host_loss.with_ratio(inputs, self._ratio(packing, vllm_is_ratio))
        loss = host_loss(inputs)
        if self.loss_type in TOKEN_MEANS:
            loss = loss * (max(packing.num_tokens, 1) / _step_tokens(packing, num_items_in_batch))
        return loss, metrics

    @property
    def _has_kl(self) -> bool:
        return self.beta != 0 and self.use_ref_model

    def _logprobs(self, rows: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.to(rows.dtype)
        return linear_logprob(rows, weight, ids, bias=bias, temperature=self.temperature).logprob

    def _host_loss(self) -> HostLoss:
        level, kind = self.importance_sampling_level, self.loss_type
        if level == "sequence" and kind in ("cispo", *_UNCLIPPED):
            raise ValueError(
                f"Sequence-level importance sampling is not supported for loss_type={kind!r}; use "
                "importance_sampling_level='token'"
            )
        return HostLoss.of(
            kind,
            level,
            beta=self.beta if self.use_ref_model else 0.0,
            max_completion_length=self.max_completion_length,
            use_bias_correction_kl=self.use_bias_correction_kl,
            **{name: getattr(self, name) for name in LOSS_CONSTANTS},
        )

    def _averages_padding(self, shape: torch.Size, ratio: Tensor | None) -> bool:
        """Whether Liger's mean runs over B·T positions: `luspo` with a term for each of them."""
        per_token = self.importance_sampling_level == "token" or self._has_kl
        return self.loss_type == "luspo" and (per_token or (ratio is not None and ratio.shape == shape))

    def _luspo_over_padding(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor | None,
        mask: Tensor,
        advantages: Tensor,
        ratio: Tensor | None,
    ) -> Tensor:
        """(): the mean over B·T positions of (length × term), LUSPO, arXiv 2602.05261.

        A term that is one per sequence comes out as in the paper. One per token (token ratios, a KL, a (B, T)
        ratio) is averaged with what stands in the padding, and weighs length/T of what `objective` gives it.
        """
        lengths = mask.sum(1, keepdim=True)
        log_ratio = logprobs - old_logprobs
        if self.importance_sampling_level == "sequence":
            log_ratio = (log_ratio * mask).sum(1, keepdim=True) / lengths.clamp(min=1)
        importance = log_ratio.exp()
        bounded = importance.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        free = importance if self.delta is None else importance.clamp(max=self.delta)
        advantages = advantages[:, None].to(logprobs.dtype)
        terms = -torch.minimum(free * advantages, bounded * advantages)
        if ratio is not None:
            terms = terms * (ratio[:, None] if ratio.dim() == 1 else ratio)
        if ref_logprobs is not None:
            kl = kl_estimate(logprobs, ref_logprobs, "k3")
            terms = terms + self.beta * (kl * importance if self.use_bias_correction_kl else kl)
        return (terms * lengths).mean()

    @torch.no_grad()
    def _metrics(self, inputs: LossInputs) -> tuple[Tensor, ...]:
        """Means over the live tokens: the KL as the loss weighs it, and the clipped share."""
        assert inputs.old_logprobs is not None
        segments = Segments.of(
            inputs.sequence_ids, inputs.loss_mask, inputs.num_sequences, inputs.logprobs.dtype
        )
        tokens = PolicyTokens(inputs.logprobs, inputs.old_logprobs, inputs.advantages, segments)
        ratio = log_importance(tokens, self.importance_sampling_level).exp()
        shares = [self._clipped(ratio, inputs.advantages).to(ratio.dtype)]
        if self.beta != 0:
            reference = inputs.logprobs if inputs.ref_logprobs is None else inputs.ref_logprobs
            kl = kl_estimate(inputs.logprobs, reference, "k3")
            shares.insert(0, kl * ratio if self.use_bias_correction_kl else kl)
        return tuple(share.sum() / max(share.numel(), 1) for share in shares)

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """(N,) bool: tokens whose ratio is out of bounds on the side where clipping takes their gradient."""
        if self.loss_type in _UNCLIPPED:
            return torch.zeros_like(ratio, dtype=torch.bool)
        if self.loss_type == "cispo":
            return (ratio > self.epsilon_high) & (advantages > 0)
        below, above = ratio < 1 - self.epsilon_low, ratio > 1 + self.epsilon_high
        return below & (advantages < 0) | above & (advantages > 0)

    def _ratio(self, packing: Packing, ratio: Tensor) -> Tensor:
        """(N,)."""
        per_token = packing.spread(ratio)
        if self.loss_type == "vespo" and ratio.shape != packing.mask.shape:
            # Vespo multiplies a sequence's tokens; a ratio of the whole sequence must come out once.
            return per_token.pow(1 / packing.spread(packing.mask.sum(1)))
        return per_token


def _step_tokens(packing: Packing, num_items_in_batch: Tensor | float | None) -> Tensor:
    """(): the normaliser of a token mean, per process and at least one."""
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_items_in_batch is not None:
        items = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=packing.mask.device)
    else:
        items = packing.mask.sum().float()
        if processes > 1:
            dist.all_reduce(items)
    return (items / processes).clamp(min=1)
