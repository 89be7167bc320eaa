"""What the head asks of a device and of the host, traced by `benchmarks.dry_head` on meta tensors.

They hold no numbers: whoever asks for one in another way raises.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from benchmarks.dry_head import HOST, SIZES, BatchSizes, head_cost
from grpo_fast.head import accelerated


@pytest.mark.parametrize("weight", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_sparse_head_takes_300_mib_and_40_launches_and_asks_the_host_last(size, weight):
    found = head_cost(BatchSizes(depth=size[0], vocabulary=size[1]), weight=weight)

    assert 0 < found.peak <= 300 << 20
    assert "forward_kernel" in found.steps and found.launches + found.operations <= 40
    assert found.steps.index(HOST) == len(found.steps) - 1


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"exact": True}, 1),
        ({"everything": True}, 1),
        ({"everything": True, "keep": True}, 1),
        ({"exact": True, "keep": True}, 0),
        ({"exact": True, "weight": False}, 0),
    ],
    ids=str,
)
def test_the_exact_backward_asks_which_rows_have_a_gradient_and_the_forward_nothing(options, reads):
    steps = head_cost(BatchSizes(), **options).steps

    assert steps.count(HOST) == reads
    assert not reads or steps.index(HOST) > steps.index("finalise_kernel")


def test_what_is_held_and_what_is_done_in_between_is_counted_once_each(monkeypatch):
    batch, forward, held = BatchSizes(rows=256, depth=64, vocabulary=1024), accelerated.forward, []
    before = head_cost(batch)

    def forward_that_holds(call, *more):
        held.append(call.hidden.new_empty(1 << 19)[:1000].t().fill_(1))  # 1 MiB of bfloat16, one operation
        return forward(call, *more)

    monkeypatch.setattr(accelerated, "forward", forward_that_holds)
    after = head_cost(batch)

    assert (after.peak, after.operations) == (before.peak + (1 << 20), before.operations + 1)
    assert after.launches == before.launches
