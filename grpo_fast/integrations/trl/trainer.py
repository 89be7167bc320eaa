"""A `trl.GRPOTrainer` that computes its loss inside the model's forward."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import ProcessorMixin
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl import GRPOConfig, GRPOTrainer

from grpo_fast.head import linear_grpo_loss
from grpo_fast.integrations.compat import private
from grpo_fast.integrations.losses import LOSS_CONSTANTS, TOKEN_MEANS, live_values, shared_config
from grpo_fast.integrations.trl.patch import HeadResults, patched, replace_head
from grpo_fast.objective import GRPOLossConfig
from grpo_fast.objective.types import present

logger = logging.getLogger(__name__)
private("trl", "trainer.grpo_trainer")

TRLBatch = dict[str, Tensor | Any]
_PER_TOKEN = ("old_per_token_logps", "ref_per_token_logps", "tool_mask")
TokenScores = tuple[Tensor | None, ...]  # log-probabilities, entropies, auxiliary loss


class FastGRPOTrainer(GRPOTrainer):
    """A faster `trl.GRPOTrainer` with the same arguments, results and metrics.

    `linear_grpo_loss` computes the loss inside the model's forward, on packed live rows. Log-probabilities
    that the training forward finds anyway are not computed beforehand. Metrics are TRL's own code on our
    log-probabilities.

    Where `linear_grpo_loss` does not compute the loss as TRL does, TRL's own loss runs on our head.
    `fallback_reason` then has the reason, which is logged once; otherwise it is None.
    """

    args: GRPOConfig
    model: torch.nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fallback_reason: str | None = None
        self._loss_at_head: LossAtHead | None = None  # of the micro-batch whose loss is being computed
        self._skip_old_pass = False
        try:
            self._loss_config = self._loss_of_arguments()
        except ValueError as error:
            self.fallback_reason = str(error)
            logger.warning("FastGRPOTrainer uses TRL's own loss: %s", self.fallback_reason)
        else:
            model = self.model
            add_loss_to_forward(model.get_base_model() if isinstance(model, PeftModel) else model)

    def _loss_of_arguments(self) -> GRPOLossConfig:
        """Return our configuration of the loss; raise ValueError where TRL must compute it."""
        by_sequence = self.importance_sampling_level == "sequence"
        learns_prompt = isinstance(self.model, PeftModel) and self.model.active_peft_config.is_prompt_learning
        reasons = {
            "the entropy bonus is a mean over each micro-batch": self._entropy_bonus_enabled,
            "the load-balancing loss of a mixture of experts is TRL's": self.aux_loss_enabled,
            "a multimodal batch is cut up by TRL": isinstance(self.processing_class, ProcessorMixin),
            "prompt learning inserts virtual tokens before the batch's": learns_prompt,
            "top_entropy_quantile < 1 takes its threshold over all processes": (
                self.top_entropy_quantile < 1 and self.accelerator.num_processes > 1
            ),
            "off_policy_mask_threshold reads the sampler's log-probabilities, which may have gaps": (
                self.use_vllm and self.off_policy_mask_threshold is not None
            ),
            "use_bias_correction_kl weighs a token's KL by the ratio of its sequence": (
                self.beta != 0 and by_sequence and self.args.use_bias_correction_kl
            ),
            "vespo takes the sampler's ratio into the weight of a sequence": (
                self.loss_type == "vespo" and self._corrects_sampler
            ),
            "DeepSpeed ZeRO-3 frees the head's weight before the backward": is_deepspeed_zero3_enabled(),
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(reason)
        constants = {name: getattr(self.args, name) for name in LOSS_CONSTANTS - {"epsilon_low"}}
        constants |= {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
        return shared_config(
            self.loss_type,
            self.importance_sampling_level,
            self.max_completion_length,
            constants,
            beta=self.beta,
            use_bias_correction_kl=self.args.use_bias_correction_kl,
            top_entropy_quantile=self.top_entropy_quantile,
            off_policy_mask_threshold=self.off_policy_mask_threshold,
        )

    @property
    def _corrects_sampler(self) -> bool:
        return self.use_vllm and self.vllm_importance_sampling_correction

    @property
    def _old_is_known_at_first_use(self) -> bool:
        """Whether the training forward yields the old log-probabilities that TRL would compute beforehand.

        It does where a micro-batch is trained on before the optimizer's next step, exactly on-policy. Later
        iterations over the same completions use them, too.
        """
        accumulated = self.args.gradient_accumulation_steps
        generated = present(self.args.steps_per_generation)
        trl_scores = accumulated % (generated * self.num_iterations) != 0
        # TRL's correction of the sampler needs the old log-probabilities before the loss.
        return trl_scores and accumulated % generated == 0 and not self._corrects_sampler

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> TRLBatch:
        self._skip_old_pass = self._old_is_known_at_first_use
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self._skip_old_pass = False

    def _get_per_token_logps_and_entropies(
        self, model: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> TokenScores:
        if self._skip_old_pass:
            # The first pass after generation computes the old log-probabilities, the next the reference's.
            self._skip_old_pass = False
            return None, None, None
        forward = model if self._loss_at_head is None else self._loss_at_head.forward_of(model)
        with patched():
            scores = super()._get_per_token_logps_and_entropies(forward, *args, **kwargs)
        if kwargs.get("compute_entropy"):
            self._training_logps = scores[0].detach()
        return scores

    def _compute_loss(self, model: torch.nn.Module, inputs: TRLBatch) -> Tensor:
        given, training = inputs, self.model.training
        if self.fallback_reason is None:
            accumulated = self.current_gradient_accumulation_steps if training else 1
            generated = present(self.args.steps_per_generation) if training else 1
            scale = step_scale(self.loss_type, inputs, self.accelerator.num_processes, accumulated, generated)
            self._loss_at_head = LossAtHead(inputs, self._loss_config, scale)
            # Tokens of tools are not scored: their log-probabilities are zero, here and in the metrics.
            live = live_tokens(inputs) != 0
            names = inputs.keys() & {"old_per_token_logps", "ref_per_token_logps"}
            given = inputs | {name: torch.where(live, inputs[name], 0) for name in names}
        try:
            # TRL makes the model's inputs and records the metrics.
            loss = super()._compute_loss(model, given)
            if self._loss_at_head is not None:
                loss = present(self._loss_at_head.loss)
        finally:
            self._loss_at_head = None
        if training and self.num_iterations > 1 and self._old_is_known_at_first_use:
            inputs.setdefault("old_per_token_logps", self._training_logps)
        return loss


class LossAtHead:
    """Replaces TRL's head for one forward; afterwards `loss` holds the loss.

    Not a dataclass: wrappers rebuild those among a forward's arguments, which would lose the result.
    """

    def __init__(self, inputs: TRLBatch, config: GRPOLossConfig, scale: Tensor | float) -> None:
        self.loss: Tensor | None = None
        self._inputs, self._config, self._scale = inputs, config, scale

    def forward_of(self, model: torch.nn.Module) -> Callable[..., Any]:
        """Return the model's forward with this in place of its head; see `add_loss_to_forward`."""

        def forward(**inputs: Any) -> Any:
            output = model(**inputs, loss_at_head=self)
            self.loss = output.loss  # with the hooks of the model's wrappers
            return output

        return forward

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *options: Any
    ) -> HeadResults:
        """Do as `FusedHead.apply`, without gradients, and keep the loss, which has them."""
        temperature, _, softcap, logit_scale, _ = options
        given, live = self._inputs, self._inputs["completion_mask"] != 0
        packed = {name: given[name].detach()[live] for name in _PER_TOKEN if given.get(name) is not None}
        advantages = live_values(given["advantages"], live)
        if (ratio := given.get("importance_sampling_ratio")) is not None:
            # The policy term is proportional to the advantage.
            advantages = advantages * live_values(ratio, live)
        result = linear_grpo_loss(
            hidden,
            weight.to(hidden.dtype),
            targets,
            advantages,
            sequence_ids=live.nonzero()[:, 0],
            old_logprobs=packed.get("old_per_token_logps"),
            ref_logprobs=packed.get("ref_per_token_logps"),
            loss_mask=packed.get("tool_mask"),
            num_sequences=len(live),
            config=self._config,
            bias=bias,
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            entropy=True,
        )
        self.loss = result.loss * self._scale
        return result.logprobs, result.entropy, None, None, None


def live_tokens(inputs: TRLBatch) -> Tensor:
    """Return the mask (B, T) of the completion tokens that TRL's loss counts."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def step_scale(
    loss_type: str, inputs: TRLBatch, processes: int, accumulated: int, generated: int
) -> Tensor | float:
    """Return the factor from the mean over a micro-batch to TRL's normalizer over the optimizer step.

    Args:
        processes: their gradients are averaged.
        accumulated: micro-batches of a step, per process.
        generated: micro-batches of a generation, per process, whose tokens `num_items_in_batch` counts.
    """
    if loss_type not in TOKEN_MEANS:
        return 1 / accumulated
    tokens = live_tokens(inputs).sum().clamp(min=1)
    return tokens * processes * generated / (inputs["num_items_in_batch"].clamp(min=1) * accumulated)


def add_loss_to_forward(model: torch.nn.Module) -> None:
    """Let `model(..., loss_at_head=LossAtHead(...))` return its loss as the output's `loss`.

    DDP's, FSDP's and PEFT's wrappers then treat the loss as any other output. TRL must have added its fused
    LM head to the model before.
    """
    scored_forward = model.forward

    @functools.wraps(scored_forward)
    def forward(_: torch.nn.Module, *args: Any, loss_at_head: LossAtHead | None = None, **kwargs: Any) -> Any:
        if loss_at_head is None:
            return scored_forward(*args, **kwargs)
        with replace_head(loss_at_head):
            output = scored_forward(*args, **kwargs)
        output.loss = loss_at_head.loss
        return output

    model.forward = types.MethodType(forward, model)
