from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from grpo_fast.plan.timeline import Event, Timeline, added_in_place, recording


def test_storages_count_once_and_until_the_last_tensor_on_them_goes() -> None:
    layer = nn.Linear(4, 4, device="meta")

    with torch.no_grad(), recording(layer) as recorder:
        made = layer(torch.empty(8, 4, device="meta"))
        view = made.T
        del made
        held = [(event.sign, event.bytes) for event in recorder.events]
        del view
        freed = recorder.events[len(held) :]

    assert held == [(1, 8 * 4 * 4), (1, 8 * 4 * 4), (-1, 8 * 4 * 4)]  # input, output; the input has gone
    assert [(event.sign, event.bytes) for event in freed] == [(-1, 8 * 4 * 4)]


def test_a_models_own_tensors_do_not_count() -> None:
    layer = nn.Linear(4, 4, device="meta")

    with recording(layer) as recorder:
        layer.weight.T.detach()

    assert recorder.events == []


def test_a_symbol_lives_like_a_tensor_and_has_no_bytes_of_its_own() -> None:
    with recording(nn.Identity()) as recorder:
        symbol = recorder.symbol("mask")
        del symbol

    assert recorder.events == [Event(1, 0, "mask"), Event(-1, 0, "mask")]


def test_a_gradient_that_autograd_adds_to_another_takes_no_room() -> None:
    events = [
        Event(1, 16),
        Event(1, 16, sum=True),
        Event(-1, 16),
        Event(-1, 16),
        Event(1, 8, sum=True),
        Event(-1, 4),
    ]

    assert added_in_place(events) == [Event(1, 16), Event(-1, 16), Event(1, 8, sum=True), Event(-1, 4)]


def test_lines_through_three_sizes_hold_for_any() -> None:
    def run(tokens: int, targets: int) -> tuple[list[Event], int]:
        made = [Event(1, 100), Event(1, 6 * tokens + 8 * targets), Event(1, 0, "mask"), Event(-1, 100)]
        return made, 3

    timeline = Timeline.fit(run)

    expected = [100, 100 + 6e6 + 8e5, 100 + 6e6 + 8e5 + 7, 6e6 + 8e5 + 7]
    np.testing.assert_allclose(timeline.live(10**6, 10**5, {"mask": 7}), expected)
    assert timeline.forward_end == 3


def test_sizes_that_change_what_is_allocated_are_refused() -> None:
    with pytest.raises(RuntimeError, match="allocates differently"):
        Timeline.fit(lambda tokens, _: ([Event(1, 8)] * (tokens // 64), 0))
