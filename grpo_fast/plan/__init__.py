"""The planner: the bytes of a step, the largest group that fits a GPU, and a value for every `auto`."""

from __future__ import annotations

from grpo_fast.plan.auto import longest_prompt, measured, resolve_auto
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.model_shape import SHAPES, model_config, shape_of
from grpo_fast.plan.search import with_values

__all__ = [
    "SHAPES",
    "device_budget",
    "longest_prompt",
    "measured",
    "model_config",
    "resolve_auto",
    "shape_of",
    "with_values",
]
