"""`LigerFusedLinearGRPOLoss` of Liger 0.8 on our head and our losses."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_fast.head import linear_logprob
from grpo_fast.integrations.liger.luspo import PaddedTokens, luspo_over_padding
from grpo_fast.integrations.padded import Packing, pack_if_given
from grpo_fast.integrations.recipe import Recipe, loss_recipe, with_ratio
from grpo_fast.objective import LossInputs, StepTotals
from grpo_fast.objective.loss import kl_estimate
from grpo_fast.objective.surrogates import PolicyTokens, log_importance
from grpo_fast.objective.types import Segments

_TOKEN_MEANS = ("dapo", "cispo", "vespo")
_UNCLIPPED = ("sapo", "vespo")


class LigerFusedLinearGRPOLoss(nn.Module):
    """A policy loss of padded completions and its metrics: KL, where beta is not 0, and the clipped share.

    `luspo` with token ratios, a KL or a (B, T) `vllm_is_ratio` is Liger's mean over every position: padding
    is scored, and what `_input` and the log-probabilities hold there enters the loss. TRL's leaves it out.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        """
        Args:
            beta: weight of the KL to the reference.
            compiled: of no effect.
            use_ref_model: whether there is a reference; without one the KL is zero.
            chunk_size: of no effect.
            epsilon_high: absolute for `cispo`.
            loss_type: grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo or vespo.
            max_completion_length: needed by dr_grpo.
            importance_sampling_level: "token", or "sequence" for all but cispo, sapo and vespo.
            delta: ceiling of the ratio where the advantage is negative.
            use_bias_correction_kl: KL term times the importance ratio of the level above.
        """
        super().__init__()
        for name, value in (
            ("sapo_temperature_pos", sapo_temperature_pos),
            ("sapo_temperature_neg", sapo_temperature_neg),
            ("delta", delta),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.beta = beta
        self.compiled = compiled
        self.use_ref_model = use_ref_model
        self.chunk_size = chunk_size
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high
        self.loss_type = loss_type
        self.max_completion_length = max_completion_length
        self.importance_sampling_level = importance_sampling_level
        self.sapo_temperature_pos = sapo_temperature_pos
        self.sapo_temperature_neg = sapo_temperature_neg
        self.temperature = temperature
        self.delta = delta
        self.use_bias_correction_kl = use_bias_correction_kl
        self.vespo_k_pos = vespo_k_pos
        self.vespo_lambda_pos = vespo_lambda_pos
        self.vespo_k_neg = vespo_k_neg
        self.vespo_lambda_neg = vespo_lambda_neg

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
        recipe = self._recipe()
        packing = Packing.of(attention_mask)
        over_padding = self._averages_padding(attention_mask.shape, vllm_is_ratio)
        scored = Packing.of(torch.ones_like(attention_mask)) if over_padding else packing
        ids = scored.pack(selected_token_ids)
        logprobs = _logprobs(scored.pack(_input), lin_weight, ids, bias, self.temperature)
        old = pack_if_given(scored, old_per_token_logps, logprobs.dtype)
        reference = None
        if self.beta != 0 and self.use_ref_model:
            reference = pack_if_given(scored, ref_per_token_logps, logprobs.dtype)
            if reference is None:
                if ref_input is None or ref_weight is None:
                    raise ValueError(
                        f"beta = {self.beta} weighs a KL to a reference model: give ref_per_token_logps, or "
                        "ref_input and ref_weight, or set use_ref_model=False"
                    )
                with torch.no_grad():
                    rows = scored.pack(ref_input)
                    reference = _logprobs(rows, ref_weight, ids, ref_bias, self.temperature)
        if over_padding:
            every = PaddedTokens(
                logprobs=scored.unpack(logprobs),
                old_logprobs=scored.unpack(logprobs.detach() if old is None else old),
                ref_logprobs=None if reference is None else scored.unpack(reference),
                mask=packing.mask,
                advantages=advantages,
                ratio=_per_row(vllm_is_ratio),
            )
            logprobs, old, reference = (
                None if values is None else values[packing.index] for values in (logprobs, old, reference)
            )
        inputs = LossInputs(
            logprobs=logprobs,
            advantages=packing.spread(advantages).to(logprobs.dtype),
            sequence_ids=packing.sequence_ids,
            loss_mask=torch.ones_like(packing.index, dtype=torch.bool),
            num_sequences=packing.num_sequences,
            old_logprobs=logprobs.detach() if old is None else old,
            ref_logprobs=reference,
            totals=StepTotals(packing.num_tokens, packing.num_sequences),
        )
        metrics = self._metrics(inputs)
        if over_padding:
            return self._luspo(every), metrics
        if vllm_is_ratio is not None:
            recipe, inputs = with_ratio(recipe, inputs, self._ratio(packing, vllm_is_ratio))
        loss = recipe.loss(inputs)
        if self.loss_type in _TOKEN_MEANS:
            loss = loss * (max(packing.num_tokens, 1) / _step_tokens(packing, num_items_in_batch))
        return loss, metrics

    def _averages_padding(self, shape: torch.Size, ratio: Tensor | None) -> bool:
        """Whether Liger's mean runs over B·T positions: `luspo` with a term for each of them."""
        per_token = self.importance_sampling_level == "token" or (self.beta != 0 and self.use_ref_model)
        return self.loss_type == "luspo" and (per_token or (ratio is not None and ratio.shape == shape))

    def _luspo(self, tokens: PaddedTokens) -> Tensor:
        return luspo_over_padding(
            tokens,
            level=self.importance_sampling_level,
            beta=self.beta,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            delta=self.delta,
            use_bias_correction_kl=self.use_bias_correction_kl,
        )

    def _recipe(self) -> Recipe:
        level, kind = self.importance_sampling_level, self.loss_type
        if level == "sequence" and kind in ("cispo", *_UNCLIPPED):
            raise ValueError(
                f"Sequence-level importance sampling is not supported for loss_type={kind!r}; use "
                "importance_sampling_level='token'"
            )
        return loss_recipe(
            kind,
            level,
            beta=self.beta if self.use_ref_model else 0.0,
            max_completion_length=self.max_completion_length,
            use_bias_correction_kl=self.use_bias_correction_kl,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            delta=self.delta,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_k_pos=self.vespo_k_pos,
            vespo_lambda_pos=self.vespo_lambda_pos,
            vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg,
        )

    @torch.no_grad()
    def _metrics(self, inputs: LossInputs) -> tuple[Tensor, ...]:
        """Means over the live tokens: the KL as the loss weighs it, and the clipped share."""
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


def _logprobs(rows: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    return linear_logprob(rows, weight.to(rows.dtype), ids, bias=bias, temperature=temperature).logprob


def _per_row(ratio: Tensor | None) -> Tensor | None:
    return ratio[:, None] if ratio is not None and ratio.dim() == 1 else ratio


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
