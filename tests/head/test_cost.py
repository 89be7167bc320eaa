"""What the head asks of a device besides its products, traced on meta tensors: see `benchmarks.dry_head`."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from benchmarks.dry_head import HOST, SIZES, Batch, head_cost
from grpo_fast.head import accelerated


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_certified_head_takes_300_mib_and_60_launches_and_asks_the_host_last(size, trainable):
    found = head_cost(Batch(depth=size[0], vocabulary=size[1]), weight=trainable)

    assert 0 < found.peak <= 300 << 20
    assert "forward_kernel" in found.steps and found.launches + found.operations <= 60
    assert found.steps.index(HOST) == len(found.steps) - 1


def test_what_is_held_and_what_is_done_in_between_is_counted_once_each(monkeypatch):
    batch, forward, held = Batch(rows=256, depth=64, vocabulary=1024), accelerated.forward, []
    before = head_cost(batch)

    def forward_that_holds(problem, *more):
        held.append(problem.hidden.new_empty(1 << 19)[:1000].t().fill_(1))  # 1 MiB of bfloat16, one operation
        return forward(problem, *more)

    monkeypatch.setattr(accelerated, "forward", forward_that_holds)
    after = head_cost(batch)

    assert (after.peak, after.operations) == (before.peak + (1 << 20), before.operations + 1)
    assert after.launches == before.launches
