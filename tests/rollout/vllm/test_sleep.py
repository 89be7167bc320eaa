from __future__ import annotations

import pytest

from grpo_fast.rollout.vllm.sleep import Phase, SleepCycle


class Sleeper:
    """vLLM's tags, one call of which may fail."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.calls: list[str] = []
        self.fails: str | None = None

    def sleep(self, level: int) -> None:
        self._call(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"} if level else {"scheduling"}

    def wake_up(self, tags: list[str]) -> None:
        self._call(f"wake {tags[0]}")
        self.asleep -= set(tags)

    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            self.fails = None
            raise MemoryError("out of memory")


def through(cycle: SleepCycle) -> None:
    cycle.sleep()
    cycle.wake_weights()
    cycle.weights_loaded()
    cycle.wake()


@pytest.mark.parametrize(
    ("level", "calls"),
    [
        (0, ["sleep 0", "wake scheduling"]),
        (1, ["sleep 1", "wake weights", "wake kv_cache"]),
        (2, ["sleep 2", "wake weights", "wake kv_cache"]),
    ],
)
def test_each_level_drives_its_tags_in_order_and_repeated_calls_drive_none(level, calls):
    sleeper = Sleeper()
    cycle = SleepCycle(sleeper, level)
    for verb in (cycle.wake, cycle.sleep, cycle.sleep, cycle.wake_weights, cycle.wake_weights, cycle.sleep):
        verb()
    cycle.weights_loaded()
    cycle.wake()
    cycle.wake()

    assert sleeper.calls == calls
    cycle.require_awake()


def test_only_level_two_needs_its_weights_loaded_before_it_wakes():
    for level in (0, 1):
        cycle = SleepCycle(Sleeper(), level)
        cycle.sleep()
        cycle.wake()
        assert cycle.phase is Phase.AWAKE

    cycle = SleepCycle(Sleeper(), 2)
    cycle.sleep()
    with pytest.raises(RuntimeError, match=r"dropped; call sync\(\) first"):
        cycle.wake()


@pytest.mark.parametrize("fails", ["sleep 2", "wake weights", "wake kv_cache"])
def test_a_step_that_failed_keeps_it_from_generating_and_can_be_asked_for_again(fails):
    sleeper = Sleeper()
    sleeper.fails = fails
    cycle = SleepCycle(sleeper, 2)

    with pytest.raises((MemoryError, RuntimeError)):
        through(cycle)
    with pytest.raises(RuntimeError, match="call wake"):
        cycle.require_awake()
    cycle.wake_weights()
    cycle.weights_loaded()
    cycle.wake()

    cycle.require_awake()
    assert not sleeper.is_sleeping()


def test_want_of_memory_at_wake_says_what_to_do():
    sleeper = Sleeper()
    sleeper.fails = "wake kv_cache"
    cycle = SleepCycle(sleeper, 1)
    cycle.sleep()

    with pytest.raises(RuntimeError, match=r"kv_cache.*out of memory.*kv_cache_gib"):
        cycle.wake()
