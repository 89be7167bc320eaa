"""`trl.GRPOTrainer` whose loss is known in the forward, on the rows that have one."""

from __future__ import annotations

import functools
import logging
import types
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import ProcessorMixin
from trl import GRPOConfig, GRPOTrainer

from grpo_fast.head import linear_grpo_loss
from grpo_fast.integrations.head_tap import logprob_and_entropy
from grpo_fast.integrations.host_loss import LOSS_CONSTANTS, TOKEN_MEANS, HostLoss
from grpo_fast.integrations.padded import Packing
from grpo_fast.integrations.trl.patch import (
    HeadResults,
    is_zero3_enabled,
    patched,
    replace_head,
    require_trl,
)
from grpo_fast.objective import LossInputs

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor | Any]
Scores = tuple[Tensor | None, Tensor | None, Tensor | None]  # log-probabilities, entropies, auxiliary loss


class FastGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with the same arguments, numbers and metrics, and less work.

    The loss is computed inside the model's forward by `linear_grpo_loss`, on packed live rows; rows without
    gradient cost nothing in the backward. Log-probabilities that the coming training forward finds anyway are
    not computed beforehand. Metrics are TRL's own code on our log-probabilities.

    What `linear_grpo_loss` does not compute as TRL does runs through TRL's own loss on our head instead;
    `fallback_reason` says why, and a warning says it once. It is None where nothing falls back.
    """

    args: GRPOConfig
    model: torch.nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_trl()
        super().__init__(*args, **kwargs)
        self.fallback_reason: str | None = None
        self._scored: Scores | None = None  # what the next scoring pass shall return
        self._skip_old_pass = False
        try:
            self._host_loss = self._loss_of_arguments()
        except ValueError as error:
            self.fallback_reason = str(error)
            logger.warning("FastGRPOTrainer uses TRL's own loss: %s", self.fallback_reason)
        else:
            model = self.model
            add_loss_to_forward(model.get_base_model() if isinstance(model, PeftModel) else model)

    def _loss_of_arguments(self) -> HostLoss:
        """Raises ValueError, with the reason, where TRL's loss must be computed by TRL."""
        reason = self._unsupported()
        if reason is not None:
            raise ValueError(reason)
        constants = {name: getattr(self.args, name) for name in LOSS_CONSTANTS if "epsilon" not in name}
        return HostLoss.of(
            self.loss_type,
            self.importance_sampling_level,
            beta=self.beta,
            max_completion_length=self.max_completion_length,
            use_bias_correction_kl=self.args.use_bias_correction_kl,
            top_entropy_quantile=self.top_entropy_quantile,
            off_policy_mask_threshold=self.off_policy_mask_threshold,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            **constants,
        )

    def _unsupported(self) -> str | None:
        if self._entropy_bonus_enabled:
            return "the entropy bonus is a mean over each micro-batch, whatever the loss's own normaliser"
        if self.top_entropy_quantile < 1 and self.accelerator.num_processes > 1:
            return "top_entropy_quantile < 1 takes its threshold over all processes"
        if self.aux_loss_enabled:
            return "the load-balancing loss of a mixture of experts is TRL's"
        if isinstance(self.processing_class, ProcessorMixin):
            return "a multimodal batch is cut up by TRL"
        if isinstance(self.model, PeftModel) and self.model.active_peft_config.is_prompt_learning:
            return "prompt learning puts tokens of its own before the batch's"
        if self.use_vllm and self.off_policy_mask_threshold is not None:
            return "off_policy_mask_threshold reads the sampler's log-probabilities, which may have gaps"
        if is_zero3_enabled():
            return "DeepSpeed ZeRO-3 takes the head's weight away before the backward"
        return None

    @property
    def _steps_per_generation(self) -> int:
        assert self.args.steps_per_generation is not None, "GRPOConfig fills it in"
        return self.args.steps_per_generation

    @property
    def _corrects_sampler(self) -> bool:
        return self.use_vllm and self.vllm_importance_sampling_correction

    @property
    def _old_is_known_at_first_use(self) -> bool:
        """Whether TRL would score the completions beforehand, to find what training finds itself.

        A micro-batch trained on before the optimiser's next step is exactly on-policy: its training forward
        yields the old log-probabilities, for this use and for later iterations over the same completions.
        """
        accumulated, generated = self.args.gradient_accumulation_steps, self._steps_per_generation
        trl_scores = accumulated % (generated * self.num_iterations) != 0
        # The sampler's correction is made of the old log-probabilities before the loss is: TRL's pass stays.
        return trl_scores and accumulated % generated == 0 and not self._corrects_sampler

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        self._skip_old_pass = self._old_is_known_at_first_use
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self._skip_old_pass = False

    def _get_per_token_logps_and_entropies(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Scores:
        if self._skip_old_pass:
            # The first pass after generation is for the old log-probabilities; the reference's follows.
            self._skip_old_pass = False
            return None, None, None
        if self._scored is not None:
            return self._scored
        with patched():
            scores = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if kwargs.get("compute_entropy"):
            self._training_logps = scores[0].detach()
        return scores

    def _compute_loss(self, model: torch.nn.Module, inputs: Batch) -> Tensor:
        if self.fallback_reason is None:
            loss = self._loss_in_forward(model, inputs)
        else:
            loss = super()._compute_loss(model, inputs)
        reused = self.model.training and self.num_iterations > 1 and self._old_is_known_at_first_use
        if reused and "old_per_token_logps" not in inputs:
            inputs["old_per_token_logps"] = self._training_logps
        return loss

    def _loss_in_forward(self, model: torch.nn.Module, inputs: Batch) -> Tensor:
        head = LossAtHead(inputs, self._host_loss, self._scale(inputs))
        with self.accelerator.autocast():
            output = model(
                input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                labels=head.labels(),
                fused_lm_head=True,
                loss_at_head=head,
            )
        length = inputs["completion_ids"].shape[1]
        self._training_logps = output.log_probs[:, -length:]
        self._record_metrics(model, inputs, output.entropy[:, -length:])
        return output.loss

    def _record_metrics(self, model: torch.nn.Module, inputs: Batch, entropies: Tensor) -> None:
        """TRL's own metrics, which its loss function records beside the loss."""
        mask = live_tokens(inputs) != 0
        masked = {
            name: torch.where(mask, inputs[name], 0)
            for name in ("old_per_token_logps", "ref_per_token_logps")
            if name in inputs
        }
        self._scored = (self._training_logps, entropies, None)
        try:
            with torch.no_grad():
                super()._compute_loss(model, {**inputs, **masked})
        finally:
            self._scored = None

    def _scale(self, inputs: Batch) -> Tensor | float:
        """From the mean over this micro-batch to TRL's normaliser over the optimiser's step."""
        training = self.model.training
        accumulated = self.current_gradient_accumulation_steps if training else 1
        generated = self._steps_per_generation if training else 1
        return step_scale(self.loss_type, inputs, self.accelerator.num_processes, accumulated, generated)


class LossAtHead:
    """Takes the place of TRL's head for one forward; afterwards `loss` holds the loss.

    A plain class: wrappers that rebuild dataclasses among a forward's arguments would lose the result.
    """

    def __init__(self, inputs: Batch, host_loss: HostLoss, scale: Tensor | float) -> None:
        """
        Args:
            inputs: TRL's batch.
            scale: factor from the mean over this batch, in the sense of the loss, to TRL's normaliser.
        """
        self.packing = Packing.of(live_tokens(inputs))
        self.loss: Tensor | None = None
        self._inputs = inputs
        self._host_loss = host_loss
        self._scale = scale

    def labels(self) -> Tensor:
        """(B, P + T) int64: the tokens whose log-probabilities the loss reads, -100 elsewhere."""
        prompt_ids, completion_ids = self._inputs["prompt_ids"], self._inputs["completion_ids"]
        ignored = torch.full_like(prompt_ids, -100)
        return torch.cat([ignored, completion_ids.masked_fill(~self.packing.mask, -100)], dim=1)

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> HeadResults:
        """The loss goes to `self.loss`; returned are log-probabilities and entropies without gradient."""
        host_loss, inputs = self._host_loss, self._loss_inputs()
        if (ratio := self._inputs.get("importance_sampling_ratio")) is not None:
            host_loss, inputs = host_loss.with_ratio(inputs, self.packing.spread(ratio))
        score = _score_by_autograd if host_loss.sequence_kl else _score_in_one
        loss, logprobs, entropies = score(
            hidden,
            weight.to(hidden.dtype),
            targets,
            host_loss,
            inputs,
            bias=bias,
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=final_logit_softcapping,
        )
        self.loss = loss * self._scale
        return logprobs, entropies, None, None, None

    def _loss_inputs(self) -> LossInputs:
        """All but the log-probabilities."""
        packing, given = self.packing, self._inputs
        return packing.loss_inputs(
            torch.empty(0),
            packing.spread(given["advantages"]),
            packing.totals,
            old_logprobs=packing.constant(given.get("old_per_token_logps")),
            ref_logprobs=packing.constant(given.get("ref_per_token_logps")),
        )


def _score_in_one(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss: HostLoss, inputs: LossInputs, **head: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    names = ("sequence_ids", "old_logprobs", "ref_logprobs", "sampler_logprobs", "num_sequences", "totals")
    given = {name: getattr(inputs, name) for name in names}
    result = linear_grpo_loss(
        hidden, weight, targets, inputs.advantages, config=loss.config, entropy=True, **given, **head
    )
    return result.loss, result.logprobs, result.entropy


def _score_by_autograd(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss: HostLoss, inputs: LossInputs, **head: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """With the term of the loss that `linear_grpo_loss` does not have."""
    logprobs, entropies = logprob_and_entropy(hidden, weight, targets, **head)
    entropies = entropies.detach()
    return loss(replace(inputs, logprobs=logprobs, entropy=entropies)), logprobs.detach(), entropies


def live_tokens(inputs: Batch) -> Tensor:
    """(B, T): the completion tokens that TRL's loss counts."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def step_scale(
    loss_type: str, inputs: Batch, processes: int, accumulated: int, generated: int
) -> Tensor | float:
    """From the mean over a micro-batch to TRL's normaliser over the optimiser's step.

    Args:
        processes: whose gradients are averaged.
        accumulated: micro-batches of a step, per process.
        generated: micro-batches of a generation, per process: what `num_items_in_batch` counts the tokens of.
    """
    if loss_type not in TOKEN_MEANS:
        return 1 / accumulated
    tokens = live_tokens(inputs).sum().clamp(min=1)
    return tokens * processes * generated / (inputs["num_items_in_batch"].clamp(min=1) * accumulated)


def add_loss_to_forward(model: torch.nn.Module) -> None:
    """Lets `model(..., loss_at_head=LossAtHead(...))` return its loss as the output's `loss`.

    Inside the forward, so that DDP's, FSDP's and PEFT's wrappers see the loss as they see any other output.

    Args:
        model: one that TRL has given its fused LM head.
    """
    scored_forward = model.forward

    @functools.wraps(scored_forward)
    def forward(
        self: torch.nn.Module, *args: Any, loss_at_head: LossAtHead | None = None, **kwargs: Any
    ) -> Any:
        if loss_at_head is None:
            return scored_forward(*args, **kwargs)
        with replace_head(loss_at_head):
            output = scored_forward(*args, **kwargs)
        output.loss = loss_at_head.loss
        return output

    model.forward = types.MethodType(forward, model)
