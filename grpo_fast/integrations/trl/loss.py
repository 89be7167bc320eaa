"""TRL's policy loss on the live rows alone, worked out where the hidden states are: inside the forward."""

from __future__ import annotations

import functools
import types
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_fast.head import linear_grpo_loss, linear_logprob
from grpo_fast.integrations.padded import Packing, pack_if_given
from grpo_fast.integrations.recipe import Recipe, with_ratio
from grpo_fast.integrations.trl.seam import HeadResults, at_seam
from grpo_fast.objective import LossInputs, StepTotals

Batch = dict[str, Tensor | Any]
_TOKEN_MEANS = ("cispo", "dapo", "vespo")


class LossAtHead:
    """Stands at the seam for one forward; afterwards `loss` holds the loss.

    A plain class: wrappers that rebuild dataclasses among a forward's arguments would lose the result.
    """

    def __init__(self, inputs: Batch, recipe: Recipe, scale: Tensor | float) -> None:
        """
        Args:
            inputs: TRL's batch.
            scale: factor from the mean over this batch, in the sense of the loss, to TRL's normaliser.
        """
        self.packing = Packing.of(live_tokens(inputs))
        self.loss: Tensor | None = None
        self._inputs = inputs
        self._recipe = recipe
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
        recipe, inputs = self._recipe, self._loss_inputs()
        ratio = self._inputs.get("importance_sampling_ratio")
        if ratio is not None:
            recipe, inputs = with_ratio(recipe, inputs, self.packing.spread(ratio))
        head = {
            "bias": bias,
            "temperature": temperature,
            "logit_scale": logit_scale,
            "softcap": final_logit_softcapping,
        }
        score = _score if recipe.sequence_kl else _score_in_one
        loss, logprobs, entropies = score(hidden, weight.to(hidden.dtype), targets, recipe, inputs, head)
        self.loss = loss * self._scale
        return logprobs, entropies, None, None, None

    def _loss_inputs(self) -> LossInputs:
        """All but the log-probabilities."""
        packing, given = self.packing, self._inputs
        return LossInputs(
            logprobs=torch.empty(0),
            advantages=packing.spread(given["advantages"]),
            sequence_ids=packing.sequence_ids,
            loss_mask=torch.ones_like(packing.index, dtype=torch.bool),
            num_sequences=packing.num_sequences,
            old_logprobs=pack_if_given(packing, given.get("old_per_token_logps"), torch.float32),
            ref_logprobs=pack_if_given(packing, given.get("ref_per_token_logps"), torch.float32),
            totals=StepTotals(packing.num_tokens, packing.num_sequences),
        )


def _score_in_one(
    hidden: Tensor, weight: Tensor, targets: Tensor, recipe: Recipe, inputs: LossInputs, head: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    result = linear_grpo_loss(
        hidden,
        weight,
        targets,
        inputs.advantages,
        sequence_ids=inputs.sequence_ids,
        old_logprobs=inputs.old_logprobs,
        ref_logprobs=inputs.ref_logprobs,
        sampler_logprobs=inputs.sampler_logprobs,
        num_sequences=inputs.num_sequences,
        totals=inputs.totals,
        config=recipe.config,
        entropy=True,
        **head,
    )
    return result.loss, result.logprobs, result.entropy


def _score(
    hidden: Tensor, weight: Tensor, targets: Tensor, recipe: Recipe, inputs: LossInputs, head: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """With the term of the recipe that `linear_grpo_loss` does not have."""
    out = linear_logprob(hidden, weight, targets, outputs=("logprob", "entropy"), **head)
    entropies = out.entropy.detach()
    loss = recipe.loss(replace(inputs, logprobs=out.logprob, entropy=entropies))
    return loss, out.logprob.detach(), entropies


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
    if loss_type not in _TOKEN_MEANS:
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
        with at_seam(loss_at_head):
            output = scored_forward(*args, **kwargs)
        output.loss = loss_at_head.loss
        return output

    model.forward = types.MethodType(forward, model)
