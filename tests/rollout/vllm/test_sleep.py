"""The cycle of sleep and wake, and vLLM's memory pool without a GPU: a device that records, in its place."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.policy.out_of_memory import is_out_of_memory
from grpo_fast.rollout.vllm.sleep import (
    GIB,
    SleepCycle,
    bytes_in_pool,
    require_empty_pool,
    require_room,
    weights_outside_the_pool,
)


class Device:
    """A GPU's free memory, and on it vLLM's pool, whose waking fails half-way when there is too little."""

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
        self._call(f"sleep {level}")
        self.paused = True
        for data in self.pointer_to_data.values() if level else ():
            self.free, data.is_asleep = self.free + data.handle[1], True

    def wake_up(self, tags: list[str]) -> None:
        self._call(f"wake {tags[0]}")
        self.paused = False
        for data in self.pointer_to_data.values():
            if data.is_asleep and data.tag in (*tags, "graph"):
                if data.handle[1] > self.free:
                    raise RuntimeError("CUDA Error: out of memory")
                self.free, data.is_asleep = self.free - data.handle[1], False

    def is_sleeping(self) -> bool:
        return self.paused or any(data.is_asleep for data in self.pointer_to_data.values())

    def empty_cache(self) -> None:
        self._call("empty")
        self.free, self.cached = self.free + self.cached, 0

    def _call(self, name: str) -> None:
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


@pytest.mark.parametrize(
    ("level", "calls"),
    [
        (0, ["sleep 0", "wake scheduling"]),
        (1, ["sleep 1", "wake weights", "wake kv_cache"]),
        (2, ["sleep 2", "wake weights", "wake kv_cache"]),
    ],
)
def test_each_level_drives_its_tags_in_order_and_repeated_calls_drive_none(device, level, calls):
    cycle = SleepCycle(device, level)
    for verb in (cycle.wake, cycle.sleep, cycle.sleep, cycle.wake_weights, cycle.wake_weights, cycle.sleep):
        verb()
    if level == 2:
        with pytest.raises(RuntimeError, match=r"sync\(\)"):
            cycle.wake()
        cycle.weights_loaded()
    cycle.wake()
    cycle.wake()

    assert device.calls == calls
    cycle.require_awake()


@pytest.mark.parametrize("fails", ["sleep 2", "wake weights", "wake kv_cache"])
def test_a_step_that_failed_keeps_it_from_generating_and_can_be_asked_for_again(device, fails):
    device.fails = fails
    cycle = SleepCycle(device, 2)
    steps = (cycle.sleep, cycle.wake_weights, cycle.weights_loaded, cycle.wake)

    with pytest.raises((MemoryError, RuntimeError)):
        for step in steps:
            step()
    with pytest.raises(RuntimeError, match="call wake"):
        cycle.require_awake()
    for step in steps[1:]:
        step()

    cycle.require_awake()
    assert not device.is_sleeping()


def test_a_wake_that_vllm_does_not_complete_is_noticed(device, monkeypatch):
    cycle = SleepCycle(device, 1)
    cycle.sleep()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="completely"):
        patch.setattr(device, "is_sleeping", lambda: True)
        cycle.wake()
    with pytest.raises(RuntimeError, match="call wake"):
        cycle.require_awake()
    cycle.wake()
    cycle.require_awake()


def test_a_tag_brings_back_its_own_memory_and_the_first_one_what_has_no_tag_of_ours(device):
    device.sleep(2)
    assert bytes_in_pool("weights") == 2 * GIB
    device.wake_up(["weights"])

    assert bytes_in_pool("kv_cache") == 5 * GIB
    assert bytes_in_pool() == 7 * GIB


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


def test_a_pool_that_an_earlier_engine_left_full_is_refused(device):
    with pytest.raises(RuntimeError, match=r"7\.00 GiB.*sleep_level"):
        require_empty_pool()

    device.pointer_to_data.clear()
    require_empty_pool()
    require_room("kv_cache")


def test_shared_weights_load_outside_the_pool_and_everything_else_in_it(monkeypatch):
    entered: list[str] = []

    class Worker:
        @contextmanager
        def _maybe_get_memory_pool_context(self, tag: str):
            entered.append(tag)
            yield

    package = SimpleNamespace(gpu_worker=SimpleNamespace(Worker=Worker))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker", package)

    def load() -> list[str]:
        entered.clear()
        for tag in ("weights", "kv_cache", "runtime"):
            with Worker()._maybe_get_memory_pool_context(tag=tag):
                pass
        return list(entered)

    with weights_outside_the_pool():
        assert load() == ["kv_cache", "runtime"]
    assert load() == ["weights", "kv_cache", "runtime"]
