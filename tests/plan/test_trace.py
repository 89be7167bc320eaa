from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from grpo_fast.plan.measure import random_batches, random_policy
from grpo_fast.plan.sizes import StepSizes, largest_micro_batch
from grpo_fast.plan.stand_ins import UNITS
from grpo_fast.plan.trace import Event, Timeline, Traces, recording

SIZES = StepSizes(prompts=3, generations=2, prompt_length=20, completion_length=12, micro_batch_tokens=10**6)


def test_storages_count_once_from_the_first_tensor_on_them_to_the_last_but_not_the_models_own() -> None:
    layer = nn.Linear(4, 4, device="meta")

    with torch.no_grad(), recording(layer) as recorder:
        own = layer.weight.T.detach()
        made = layer(torch.empty(8, 4, device="meta"))
        view = made.T
        del own, made
        assert recorder.events == [Event(1, 128), Event(1, 128), Event(-1, 128)]
        del view

    assert recorder.events[3:] == [Event(-1, 128)]


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_gradient_that_autograd_adds_to_another_takes_no_room(in_backward: bool) -> None:
    with torch.no_grad(), recording(nn.Identity()) as recorder:
        gradient, more = torch.empty(4, device="meta"), torch.empty(4, device="meta")
        recorder.in_backward = in_backward
        gradient = gradient + more
        alive = np.cumsum([event.sign * event.bytes for event in recorder.events])
        del gradient, more

    assert (alive.max(), alive[-1]) == (32 if in_backward else 48, 32)


def test_a_batch_of_any_size_has_the_bytes_of_a_trace_at_its_sizes() -> None:
    sizes = (100, 6 * UNITS["tokens"], 8 * UNITS["targets"], UNITS["mask"])
    events = [*(Event(1, size) for size in sizes), Event(-1, 100)]

    timeline = Timeline.of(events, 3)

    expected = [100, 100 + 6e6, 100 + 6e6 + 8e5, 100 + 6e6 + 8e5 + 7, 6e6 + 8e5 + 7]
    np.testing.assert_array_equal(timeline.live({"tokens": 10**6, "targets": 10**5, "mask": 7}), expected)
    with pytest.raises(RuntimeError, match="grows otherwise"):
        Timeline.of([Event(1, UNITS["tokens"] + 1)], 1)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_what_is_kept_for_the_backward_is_what_autograd_saves(
    family: str, config: Any, predictor: Any, apart: None
) -> None:
    planned = predictor(config(family))
    policy = random_policy(
        planned.traces.config, planned.run.model, attention="sdpa", device=torch.device("cpu")
    )
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

    timeline = planned.traces.update(planned.run.model, "sdpa", first=False)
    tokens, largest = len(batch.input_ids), largest_micro_batch(SIZES)
    joined = {"joined": largest.joined * largest.sequence, "mask": 4 * largest.masked}
    sizes = {"tokens": tokens, "targets": len(batch.targets)} | joined
    kept = timeline.live(sizes)[timeline.forward_end - 1]

    # Besides what autograd saves: tables of angles, and numbers per token that the loss still holds.
    assert exact <= kept <= 1.02 * exact + 64 * tokens


def kept_per_token(traces: Traces, model: Any, attention: str) -> float:
    timeline = traces.update(model, attention, first=False)
    return timeline.live({"tokens": 1000})[timeline.forward_end - 1] / 1000


def test_checkpointing_keeps_the_inputs_of_layers_or_of_their_mlps_alone(config: Any, predictor: Any) -> None:
    traces = Traces(config("llama"))

    all_kept, without_mlps, kept = (
        kept_per_token(traces, predictor(traces, gradient_checkpointing=on).run.model, "flash_attention_2")
        for on in (False, "mlp", True)
    )

    mlps = 4 * 256 * 4 * 3  # of three layers gate, up, the gate's activation and its product with up
    assert without_mlps == pytest.approx(all_kept - mlps)
    inputs = 4 * 128 * (3 + 1)  # of three layers and of the final norm
    assert inputs <= kept <= 2 * inputs < all_kept / 4


def test_fused_norms_and_mlps_keep_what_they_read(config: Any, predictor: Any) -> None:
    traces = Traces(config("llama"))

    def kept(fused: bool, **keys: Any) -> float:
        model = predictor(traces, **keys).run.model
        timeline = traces.update(model, "flash_attention_2", first=False, fused=fused)
        return timeline.live({"tokens": 1000})[timeline.forward_end - 1] / 1000

    for keys in ({}, {"gradient_checkpointing": "mlp"}):
        products = 0 if keys else 3 * 256  # of three layers the activation of the gate
        # Seven norms keep their input in float32 as it is, and one number a row rather than the product.
        assert kept(False, **keys) - kept(True, **keys) == 4 * (products + 7 * 128)


def test_the_attentions_differ_in_what_they_hold(config: Any, predictor: Any) -> None:
    plain = Traces(config(num_attention_heads=4, num_key_value_heads=2))
    odd = Traces(config(hidden_size=96, num_attention_heads=3, num_key_value_heads=1, head_dim=32))

    def kept(traces: Traces, attention: str) -> float:
        return kept_per_token(traces, predictor(traces).run.model, attention)

    flash, sdpa, flex = (kept(plain, name) for name in ("flash_attention_2", "sdpa", "flex_attention"))
    assert flash == flex < sdpa  # which puts the documents' results together once more
    assert kept(odd, "flex_attention") > kept(odd, "flash_attention_2")  # and repeats keys for odd heads

    def per_prompt_token(attention: str) -> list[float]:
        """Bytes kept, and at the peak of the backward."""
        timeline = plain.update(predictor(plain).run.model, attention, first=False)
        alive = timeline.live({"joined": 1}) - timeline.live({})
        return [alive[timeline.forward_end - 1], alive.max()]

    large = Traces(config(num_attention_heads=4, num_key_value_heads=2, head_dim=512))
    peaks = [
        large.update(predictor(large).run.model, attention, first=False).live({"tokens": 1000}).max() / 1000
        for attention in ("flash_attention_2", "flex_attention")
    ]
    assert (
        peaks[0] - peaks[1] == 3 * 4 * 512 * 4
    )  # of each head the query's sum, a key's and a value's gradient

    copies = 3 * 2 * 2 * 32 * 4  # of three layers keys and values, two heads of 32 numbers in float32
    of_heads = 2 * 4 * 32 * 4  # gradients of keys and values for each of four heads
    assert per_prompt_token("flash_attention_2") == [copies, copies + of_heads]
    assert per_prompt_token("flex_attention") == [0, 0]
