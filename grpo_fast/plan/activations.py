"""What a forward and a backward hold, from our forward on the meta device: any architecture, no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from grpo_fast.plan.stand_ins import Setting, planned_logprobs, planning
from grpo_fast.plan.timeline import Event, Run, added_in_place, recording
from grpo_fast.policy import PackedBatch, Policy


def update_run(model: nn.Module, attention: str, *, masked: bool, first: bool) -> Run:
    """Forward, loss and backward of one micro-batch, besides the model, its masters and their buffers.

    Args:
        model: of `skeleton`.
        attention: as `resolve_attention` gives it.
        masked: whether completions share their prompts, so that documents are masked.
        first: no gradients are there yet: those of float32 parameters appear on the way, and stay. In later
            micro-batches, and for 16-bit parameters always, they are added to what is there already.
    """
    policy = _policy(model)

    def run(tokens: int, targets: int) -> tuple[list[Event], int]:
        batch = _batch(tokens, targets)
        with _gradients(model, first), recording(model) as recorder:
            with planning(Setting(attention, masked, recorder.symbol)):
                head, weight = policy.head, policy.head.weight
                # The head adds its gradient to the weight's by itself: see `PolicyOptimizer.gradient_of`.
                logprobs = planned_logprobs(
                    policy.hidden_states(batch), weight.detach(), head.bias, recorder.symbol
                )
                loss = logprobs.sum()
                del logprobs
                forward_end = len(recorder.events)
                if first and weight.requires_grad and weight.element_size() == 4:
                    weight.grad = torch.zeros_like(weight)
                loss.backward()
                del loss
            events = recorder.events
            return events[:forward_end] + added_in_place(events[forward_end:]), forward_end

    return run


def forward_run(model: nn.Module) -> Run:
    """A forward without gradients, as for the prefill of prompts."""
    policy = _policy(model)

    def run(tokens: int, targets: int) -> tuple[list[Event], int]:
        batch = _batch(tokens, targets)
        with torch.no_grad(), recording(model) as recorder:
            policy.hidden_states(batch)
            return list(recorder.events), len(recorder.events)

    return run


def _policy(model: nn.Module) -> Policy:
    """Which attention it names does not matter here, but that it hands transformers a ready mask."""
    return Policy(model, tokenizer=None, attention="sdpa")


def _batch(tokens: int, targets: int) -> PackedBatch:
    """What a forward reads of a packed batch. Where documents begin is known, and no operator's input."""

    def meta(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    return PackedBatch(
        input_ids=meta(tokens),
        position_ids=meta(tokens),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        max_seqlen=tokens,
        loss_index=meta(targets),
        targets=meta(targets),
        sequence_ids=meta(targets),
        group_ids=meta(targets),
        advantages=meta(targets, torch.float32),
        sampler_logprobs=meta(targets, torch.float32),
        num_sequences=1,
        sample_ids=meta(1),
    )


@contextmanager
def _gradients(model: nn.Module, first: bool) -> Iterator[None]:
    """Gradients leave the parameter as they do in `PolicyOptimizer`, and none stays behind."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    passing = [p for p in parameters if not first or p.element_size() < 4]
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in passing]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in parameters:
            parameter.grad = None


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
