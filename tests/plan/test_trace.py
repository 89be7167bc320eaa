from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from grpo_fast.plan.measure import random_batches, random_policy
from grpo_fast.plan.model_shape import skeleton, with_layers
from grpo_fast.plan.setup import StepSizes
from grpo_fast.plan.trace import (
    Event,
    IrregularLayersError,
    Run,
    Timeline,
    Traces,
    added_in_place,
    recording,
    trace_update,
    with_more_layers,
)
from grpo_fast.policy.config import LoraConfig

SIZES = StepSizes(prompts=3, generations=2, prompt_length=20, completion_length=12, micro_batch_tokens=10**6)
CHECKPOINTED, ADAPTED = {"gradient_checkpointing": True}, {"lora": LoraConfig(r=4)}


def test_storages_count_once_and_until_the_last_tensor_on_them_goes() -> None:
    layer = nn.Linear(4, 4, device="meta")

    with torch.no_grad(), recording(layer) as recorder:
        made = layer(torch.empty(8, 4, device="meta"))
        view = made.T
        del made
        assert [(event.sign, event.bytes) for event in recorder.events] == [(1, 128), (1, 128), (-1, 128)]
        del view

    assert [(event.sign, event.bytes) for event in recorder.events[3:]] == [(-1, 128)]


def test_a_models_own_tensors_do_not_count() -> None:
    layer = nn.Linear(4, 4, device="meta")

    with recording(layer) as recorder:
        layer.weight.T.detach()

    assert recorder.events == []


def test_a_column_lives_like_a_tensor_and_has_no_bytes_of_its_own() -> None:
    with recording(nn.Identity()) as recorder:
        tensor = recorder.column("mask")
        del tensor

    assert recorder.events == [Event(1, 0, "mask"), Event(-1, 0, "mask")]


def test_a_gradient_that_autograd_adds_to_another_takes_no_room() -> None:
    added, unequal = Event(1, 16, is_sum=True), Event(1, 8, is_sum=True)
    events = [Event(1, 16), added, Event(-1, 16), Event(-1, 16), unequal, Event(-1, 4)]

    assert added_in_place(events) == [Event(1, 16), Event(-1, 16), unequal, Event(-1, 4)]


def test_lines_through_three_sizes_hold_for_any() -> None:
    def trace(tokens: int, targets: int) -> Run:
        lines = [Event(1, 100), Event(1, 6 * tokens + 8 * targets), Event(1, 0, "mask"), Event(-1, 100)]
        return Run(lines, 3)

    timeline = Timeline.fit(trace)

    expected = [100, 100 + 6e6 + 8e5, 100 + 6e6 + 8e5 + 7, 6e6 + 8e5 + 7]
    np.testing.assert_allclose(timeline.live(10**6, 10**5, {"mask": 7}), expected)
    assert timeline.forward_end == 3


def test_sizes_that_change_what_is_allocated_are_refused() -> None:
    with pytest.raises(RuntimeError, match="allocates differently"):
        Timeline.fit(lambda tokens, _: Run([Event(1, 8)] * (tokens // 64), 0))


def test_a_layer_more_that_is_no_block_is_noticed() -> None:
    def trace(*sizes: int) -> Any:
        return lambda tokens, targets: Run([Event(1, size) for size in sizes], len(sizes))

    assert len(with_more_layers(trace(1, 5, 2), trace(1, 5, 5, 2), 3)(0, 0).events) == 6
    with pytest.raises(IrregularLayersError):
        with_more_layers(trace(1, 5, 2), trace(1, 7, 5, 9, 2), 3)(0, 0)


@pytest.mark.parametrize(
    ("family", "way"),
    [("qwen2", CHECKPOINTED), ("qwen2", ADAPTED), ("gpt_neox", {}), ("qwen3_moe", {}), ("gemma3_text", {})],
    ids=str,
)
def test_a_few_layers_tell_what_all_of_them_do(
    family: str, way: dict[str, Any], config: Any, setup: Any
) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 3} if family == "gemma3_text" else {}
    deep = config(family, num_hidden_layers=6, **kinds)
    model = setup(deep, dtype="bfloat16", **way).model

    found = Traces(deep).update(model, "sdpa", masked=True, first=False)

    whole = Timeline.fit(trace_update(skeleton(deep, model), "sdpa", masked=True, first=False))
    sizes = (1000, 800, {"mask": 50_000, "head_kept": 7, "head_forward": 11, "head_backward": 13})
    np.testing.assert_array_equal(found.live(*sizes), whole.live(*sizes))
    assert found.forward_end == whole.forward_end


def test_fewer_layers_keep_their_kinds(config: Any) -> None:
    short = with_layers(config("gemma3_text"), 2)

    assert (short.num_hidden_layers, short.layer_types) == (2, ["sliding_attention"] * 2)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_what_is_kept_for_the_backward_is_what_autograd_saves(family: str, config: Any, setup: Any) -> None:
    planned = setup(config(family))
    policy = random_policy(planned.config, planned.model, attention="sdpa", device=torch.device("cpu"))
    (batch,) = random_batches(policy, SIZES)
    own = {p.untyped_storage()._cdata for p in policy.model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = policy.hidden_states(batch)
    saved[hidden.untyped_storage()._cdata] = hidden  # the head keeps it
    exact = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())

    timeline = Traces(planned.config).update(planned.model, "sdpa", masked=True, first=False)
    squares = int(batch.cu_seqlens.diff().square().sum())
    tokens, targets = len(batch.input_ids), len(batch.targets)
    kept = timeline.live(tokens, targets, {"mask": 4 * squares})[timeline.forward_end - 1]

    # Besides what autograd saves: tables of angles, and numbers per token that the loss still holds.
    assert exact <= kept <= 1.02 * exact + 64 * tokens


def kept_per_token(traces: Traces, model: Any, attention: str) -> float:
    timeline = traces.update(model, attention, masked=False, first=False)
    return timeline.live(1000, 0, {})[timeline.forward_end - 1] / 1000


def test_checkpointing_keeps_the_inputs_of_layers_alone(config: Any, setup: Any) -> None:
    traces = Traces(config("llama"))

    all_kept, kept = (
        kept_per_token(traces, setup(traces.config, gradient_checkpointing=on).model, "flash_attention_2")
        for on in (False, True)
    )

    inputs = 4 * 128 * (3 + 1)  # of three layers and of the final norm
    assert inputs <= kept <= 2 * inputs < all_kept / 4


def test_the_attentions_differ_in_what_they_hold(config: Any, setup: Any) -> None:
    plain = Traces(config(num_attention_heads=4, num_key_value_heads=2))
    odd = Traces(config(hidden_size=96, num_attention_heads=3, num_key_value_heads=1, head_dim=32))

    def kept(traces: Traces, attention: str) -> float:
        return kept_per_token(traces, setup(traces.config).model, attention)

    flash, sdpa, flex = (kept(plain, name) for name in ("flash_attention_2", "sdpa", "flex_attention"))
    assert flash == flex < sdpa  # which puts the documents' results together once more
    assert kept(odd, "flex_attention") > kept(odd, "flash_attention_2")  # and repeats keys for odd heads


def test_the_trace_leaves_no_gradients_and_no_hooks(config: Any, setup: Any) -> None:
    model = skeleton(config(), setup(config()).model)

    trace_update(model, "sdpa", masked=False, first=True)(32, 16)

    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
