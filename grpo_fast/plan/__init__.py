"""What fits and is fast: bytes predicted and measured, what `auto` becomes, and what buys room."""

from __future__ import annotations

from grpo_fast.plan.auto import longest_prompt, resolve_auto, shapes_of
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.measure import calibrated
from grpo_fast.plan.model_shape import SHAPES, Shapes, model_config
from grpo_fast.plan.search import plan, with_values
from grpo_fast.plan.sizes import step_sizes

__all__ = [
    "SHAPES",
    "Shapes",
    "calibrated",
    "device_budget",
    "longest_prompt",
    "model_config",
    "plan",
    "resolve_auto",
    "shapes_of",
    "step_sizes",
    "with_values",
]
