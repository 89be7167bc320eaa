"""vLLM's memory pool without a GPU: an allocator that records, in the place of vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.policy.out_of_memory import is_out_of_memory
from grpo_fast.rollout.vllm.memory import (
    GIB,
    bytes_in_pool,
    require_empty_pool,
    require_room,
    weights_outside_the_pool,
)
from grpo_fast.rollout.vllm.sleep import SleepCycle


class Device:
    """A GPU's free memory, and on it a pool whose waking fails half-way when there is too little."""

    def __init__(self) -> None:
        self.free, self.calls = 10 * GIB, []
        self.pointer_to_data = {
            place: SimpleNamespace(handle=(0, size * GIB, place, 0), tag=tag, is_asleep=False)
            for place, (tag, size) in enumerate(
                [("weights", 1), ("kv_cache", 2), ("kv_cache", 3), ("graph", 1)]
            )
        }

    def sleep(self, level: int) -> None:
        self.calls.append("sleep")
        for data in self.pointer_to_data.values():
            self.free, data.is_asleep = self.free + data.handle[1], True

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")
        for data in self.pointer_to_data.values():
            if data.is_asleep and data.tag in (*tags, "graph"):
                if data.handle[1] > self.free:
                    raise RuntimeError("CUDA Error: out of memory")
                self.free, data.is_asleep = self.free - data.handle[1], False

    def is_sleeping(self) -> bool:
        return any(data.is_asleep for data in self.pointer_to_data.values())


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device()
    allocator = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=device))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", allocator)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (device.free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: device.calls.append("empty"))
    return device


def test_a_tag_brings_back_its_own_memory_and_the_first_one_what_has_no_tag_of_ours(device):
    device.sleep(2)
    assert bytes_in_pool("weights") == 2 * GIB
    device.wake_up(["weights"])

    assert bytes_in_pool("kv_cache") == 5 * GIB
    assert bytes_in_pool() == 7 * GIB


def test_without_room_vllm_is_not_asked_to_wake_and_with_room_it_then_wakes(device):
    cycle = SleepCycle(device, 1, require_room)
    cycle.sleep()
    cycle.wake_weights()
    device.free = 4 * GIB

    with pytest.raises(
        RuntimeError, match=r"kv_cache.*out of memory.*5\.00 GiB, and 4\.00 GiB are free"
    ) as no:
        cycle.wake()
    assert is_out_of_memory(no.value)
    assert device.calls == ["sleep", "wake weights", "empty"]  # torch's cache was given back, to no avail

    device.free = 5 * GIB
    cycle.wake()
    cycle.require_awake()


def test_what_torch_had_cached_may_make_the_room(device, monkeypatch):
    device.sleep(1)
    device.free = 0
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(device, "free", 6 * GIB))

    require_room("kv_cache")


def test_a_pool_that_an_earlier_engine_left_full_is_refused(device):
    with pytest.raises(RuntimeError, match=r"7\.00 GiB.*new process.*sleep_level to 0"):
        require_empty_pool()

    device.pointer_to_data.clear()
    require_empty_pool()


def test_shared_weights_load_outside_the_pool_and_everything_else_in_it(monkeypatch):
    entered: list[str] = []

    class Worker:
        @contextmanager
        def _maybe_get_memory_pool_context(self, tag: str) -> Iterator[None]:
            entered.append(tag)
            yield

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=Worker))

    def load() -> None:
        for tag in ("weights", "kv_cache", "runtime"):
            with Worker()._maybe_get_memory_pool_context(tag=tag):
                pass

    with weights_outside_the_pool():
        load()
    assert entered == ["kv_cache", "runtime"]
    load()
    assert entered[2:] == ["weights", "kv_cache", "runtime"]
