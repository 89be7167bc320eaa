"""Trees of plain data and their dotted places."""

from __future__ import annotations

from grpo_fast.config.tree import differences, value_at


def test_two_configurations_differ_in_the_keys_that_are_named():
    before = {"a": 1, "lora": None, "rewards": [{"weight": 1}, {"weight": 2}], "stages": [1]}
    now = {"a": 1, "lora": {"r": 2}, "rewards": [{"weight": 1}, {"weight": 3}], "stages": [1, 2]}
    found = [*differences(before, now)]
    assert found == [("lora", None, {"r": 2}), ("rewards.1.weight", 2, 3), ("stages", [1], [1, 2])]
    assert all(value_at(now, key) == new for key, _, new in found)
    assert value_at(now, "lora.alpha.x") is value_at(now, "rewards.7.weight") is None
