from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from grpo_fast.plan.stand_ins import UNITS
from grpo_fast.plan.trace import Event, Timeline, Traces, recording


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


@pytest.fixture
def alive(predictor: Any) -> Any:
    """`alive(traces, "sdpa", {"tokens": 1000})`: bytes kept for the backward, and at its peak."""

    def bytes_of(traces: Traces, attention: str, sizes: dict[str, int], *, fused: bool = False, **keys: Any):
        model = predictor(traces, **keys).run.model
        timeline = traces.update(model, attention, first=False, fused=fused)
        held = timeline.live(sizes) - timeline.live({})
        return [held[timeline.forward_end - 1], held.max()]

    return bytes_of


def test_fused_norms_and_mlps_keep_what_they_read(config: Any, alive: Any) -> None:
    traces = Traces(config("llama"))
    for keys in ({}, {"gradient_checkpointing": "mlp"}):
        (plain, _), (fused, _) = (
            alive(traces, "flash_attention_2", {"tokens": 1}, fused=fused, **keys) for fused in (False, True)
        )

        products = 0 if keys else 3 * 256  # of three layers the activation of the gate
        # Seven norms keep their input in float32 as it is, and one number a row rather than the product.
        assert plain - fused == 4 * (products + 7 * 128)


def test_the_attentions_differ_in_what_they_hold(config: Any, alive: Any) -> None:
    plain = Traces(config(num_attention_heads=4, num_key_value_heads=2))
    odd = Traces(config(hidden_size=96, num_attention_heads=3, num_key_value_heads=1, head_dim=32))
    large = Traces(config(num_attention_heads=4, num_key_value_heads=2, head_dim=512))

    def of(traces: Traces, unit: str) -> list[list[float]]:
        names = ("flash_attention_2", "flex_attention", "sdpa")
        return [alive(traces, name, {unit: 1}) for name in names]

    (flash, _), (flex, _), (sdpa, _) = of(plain, "tokens")
    assert flash == flex < sdpa  # which puts the documents' results together once more
    (flash, _), (flex, _), _ = of(odd, "tokens")
    assert flex > flash  # and repeats keys for odd heads
    (_, flash), (_, flex), _ = of(large, "tokens")
    assert flash - flex == 3 * 4 * 512 * 4  # of each head the query's sum, a key's and a value's gradient
    copies = 3 * 2 * 2 * 32 * 4  # of three layers keys and values, two heads of 32 numbers in float32
    of_heads = 2 * 4 * 32 * 4  # gradients of keys and values for each of four heads
    assert of(plain, "joined")[:2] == [[copies, copies + of_heads], [0, 0]]
