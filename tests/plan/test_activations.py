from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from grpo_fast.plan.activations import update_run
from grpo_fast.plan.measure import random_batches, random_policy
from grpo_fast.plan.setup import Workload
from grpo_fast.plan.traces import Traces

WORK = Workload(prompts=3, generations=2, prompt_length=20, completion_length=12, micro_batch_tokens=10**6)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt_neox"])
def test_what_is_kept_for_the_backward_is_what_autograd_saves(family: str, config: Any, setup: Any) -> None:
    planned = setup(config(family))
    policy = random_policy(planned.config, planned.model, attention="sdpa", device=torch.device("cpu"))
    (batch,) = random_batches(policy, WORK)
    own = {p.untyped_storage()._cdata for p in policy.model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = policy.hidden_states(batch)
    saved[hidden.untyped_storage()._cdata] = hidden  # the head keeps it
    exact = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())

    timeline = Traces(planned.config).of(planned.model).update("sdpa", masked=True, first=False)
    squares = int(batch.cu_seqlens.diff().square().sum())
    tokens, targets = len(batch.input_ids), len(batch.targets)
    kept = timeline.live(tokens, targets, {"mask": 4 * squares})[timeline.forward_end - 1]

    # Besides what autograd saves: tables of angles, and numbers per token that the loss still holds.
    assert exact <= kept <= 1.02 * exact + 64 * tokens


def test_checkpointing_keeps_the_inputs_of_layers_alone(config: Any, setup: Any) -> None:
    traces = Traces(config("llama"))
    tokens, width = 1000, 128

    kept = {}
    for checkpointing in (False, True):
        model = setup(traces.config, gradient_checkpointing=checkpointing).model
        timeline = traces.of(model).update("flash_attention_2", masked=False, first=False)
        kept[checkpointing] = timeline.live(tokens, 0, {})[timeline.forward_end - 1] / tokens

    inputs = 4 * width * (3 + 1)  # of three layers and of the final norm
    assert inputs <= kept[True] <= 2 * inputs < kept[False] / 4


def test_the_trace_leaves_no_gradients_and_no_hooks(config: Any, setup: Any) -> None:
    from grpo_fast.plan.model_shape import skeleton

    model = skeleton(config(), setup(config()).model)

    update_run(model, "sdpa", masked=False, first=True)(32, 16)

    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_the_attentions_differ_in_what_they_hold(config: Any, setup: Any) -> None:
    traces = Traces(config(num_attention_heads=4, num_key_value_heads=2))
    odd = Traces(config(hidden_size=96, num_attention_heads=3, num_key_value_heads=1, head_dim=32))

    def kept(traces: Traces, attention: str) -> float:
        timeline = traces.of(setup(traces.config).model).update(attention, masked=False, first=False)
        return timeline.live(1000, 0, {})[timeline.forward_end - 1]

    flash, sdpa, flex = (kept(traces, name) for name in ("flash_attention_2", "sdpa", "flex_attention"))
    assert flash == flex < sdpa  # which puts the documents' results together once more
    assert kept(odd, "flex_attention") > kept(odd, "flash_attention_2")  # and repeats keys for odd heads
