"""The cycle of sleep and wake, and vLLM's memory pool without a GPU: a device that records, in its place."""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.policy.out_of_memory import is_out_of_memory
from grpo_fast.rollout.vllm.sleep import (
    GIB,
    SleepCycle,
    bounded_cache,
    require_empty_pool,
    weights_outside_the_pool,
)


class Device:
    """A GPU's free memory, and on it vLLM's pool."""

    def __init__(self) -> None:
        self.free, self.cached, self.paused = 10 * GIB, 0, False
        self.calls: list[str] = []
        self.fails: str | None = None  # the call that fails once
        sizes = [("weights", 1), ("kv_cache", 2), ("kv_cache", 3), ("graph", 1)]
        self.pointer_to_data = {
            place: SimpleNamespace(handle=(0, size * GIB, place, 0), tag=tag, is_asleep=False)
            for place, (tag, size) in enumerate(sizes)
        }

    def sleep(self, level: int) -> None:
        self.call(f"sleep {level}")
        self.paused = True
        for data in self.pointer_to_data.values() if level else ():
            data.is_asleep = True

    def wake_up(self, tags: list[str]) -> None:
        self.call(f"wake {tags[0]}")
        self.paused = False
        for data in self.pointer_to_data.values():
            data.is_asleep &= data.tag not in (*tags, "graph")

    def is_sleeping(self) -> bool:
        return self.paused or any(data.is_asleep for data in self.pointer_to_data.values())

    def empty_cache(self) -> None:
        self.call("empty")
        self.free, self.cached = self.free + self.cached, 0

    def call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            self.fails = None
            raise MemoryError("out of memory")


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device()
    allocator = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=device))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", allocator)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (device.free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", device.empty_cache)
    return device


@pytest.mark.parametrize("level", [0, 1, 2])
def test_each_level_drives_its_tags_in_order_and_repeated_calls_drive_none(device, level):
    cycle = SleepCycle(device, level)
    for verb in (cycle.wake, cycle.sleep, cycle.sleep):
        verb()
    freed = [cycle.freed() // GIB]
    for verb in (cycle.wake_weights, cycle.wake_weights, cycle.sleep):
        verb()
    freed.append(cycle.freed() // GIB)
    if level == 2:
        with pytest.raises(RuntimeError, match=r"sync\(\)"):
            cycle.wake()
        cycle.weights_loaded()
    cycle.wake()
    cycle.wake()

    wakes = ["wake weights", "wake kv_cache"] if level else ["wake scheduling"]
    assert device.calls == [f"sleep {level}", *wakes]
    assert [*freed, cycle.freed()] == ([7, 5, 0] if level else [0, 0, 0])  # with the first: what has no tag
    cycle.require_awake()


@pytest.mark.parametrize("fails", ["sleep 2", "wake weights", "wake kv_cache", "is_sleeping"])
def test_a_failed_step_keeps_it_from_generating_and_can_be_repeated(device, monkeypatch, fails):
    cycle = SleepCycle(device, 2)
    steps = (cycle.sleep, cycle.wake_weights, cycle.weights_loaded, cycle.wake)
    with monkeypatch.context() as patch, pytest.raises((MemoryError, RuntimeError)):
        device.fails = fails
        if fails == "is_sleeping":  # vLLM says that it did not wake up completely
            patch.setattr(device, "is_sleeping", lambda: True)
        for step in steps:
            step()
    with pytest.raises(RuntimeError, match="call wake"):
        cycle.require_awake()
    for step in steps[1:]:
        step()

    cycle.require_awake()
    assert not device.is_sleeping()


def test_without_room_vllm_is_not_asked_to_wake_and_with_room_it_then_wakes(device):
    cycle = SleepCycle(device, 1)
    cycle.sleep()
    cycle.wake_weights()
    device.free = 4 * GIB

    with pytest.raises(RuntimeError, match=r"kv_cache.*5\.00 GiB, and 4\.00 GiB.*kv_cache_gib") as no:
        cycle.wake()
    assert is_out_of_memory(no.value)
    assert device.calls == ["sleep 1", "wake weights", "empty"]  # torch's cache was given back, to no avail

    device.cached = GIB
    cycle.wake()
    cycle.require_awake()
    with pytest.raises(RuntimeError, match=r"7\.00 GiB.*sleep_level"):
        require_empty_pool()
    device.pointer_to_data.clear()
    require_empty_pool()


def test_shared_weights_load_outside_the_pool_and_everything_else_in_it(monkeypatch):
    entered: list[str] = []

    class Worker:
        @contextmanager
        def _maybe_get_memory_pool_context(self, tag: str):
            entered.append(tag)
            yield

    monkeypatch.setitem(
        sys.modules, "vllm.v1.worker", SimpleNamespace(gpu_worker=SimpleNamespace(Worker=Worker))
    )
    for outside in (weights_outside_the_pool, nullcontext):
        with outside():
            for tag in ("weights", "kv_cache"):
                with Worker()._maybe_get_memory_pool_context(tag=tag):
                    pass
    assert entered == ["kv_cache", "weights", "kv_cache"]


@pytest.mark.parametrize(
    ("measured", "most", "share", "given"),
    [(2, 3, 1.0, 2), (8, math.inf, 0.5, 4), (8, 3, 0.5, 1.5), (-1, 3, 1.0, None)],
)
def test_the_kv_cache_takes_the_planned_or_the_measured_room(
    monkeypatch, caplog, measured, most, share, given
):
    worker = type("Worker", (), {"determine_available_memory": lambda self: measured * GIB})
    module = SimpleNamespace(gpu_worker=SimpleNamespace(Worker=worker))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker", module)
    refused = pytest.raises(ValueError, match=r"1\.00 GiB more.*max_sequences")
    with bounded_cache(most, share), refused if given is None else nullcontext():
        assert worker().determine_available_memory() == given * GIB
    assert ("rollout.vllm.kv_cache_gib = 3" in caplog.text) == (measured == 2)
    assert worker().determine_available_memory() == measured * GIB
