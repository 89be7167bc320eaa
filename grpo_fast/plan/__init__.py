"""The planner: the bytes of a step, the largest group that fits a GPU, and a value for every `auto`."""

from __future__ import annotations

from grpo_fast.plan.auto import longest_prompt, measured, resolve_auto
from grpo_fast.plan.devices import DeviceBudget, device_budget
from grpo_fast.plan.memory import step_total
from grpo_fast.plan.model_shape import SHAPES, model_config, model_shape, shape_of
from grpo_fast.plan.search import with_values

__all__ = [
    "SHAPES",
    "DeviceBudget",
    "device_budget",
    "longest_prompt",
    "measured",
    "model_config",
    "model_shape",
    "resolve_auto",
    "shape_of",
    "step_total",
    "with_values",
]
