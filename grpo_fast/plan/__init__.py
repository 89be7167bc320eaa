"""What fits and is fast: bytes predicted and measured, what `auto` becomes, and what buys room."""

from __future__ import annotations

from grpo_fast.plan.auto import longest_prompt, resolve_auto, traces_of
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.measure import calibrated
from grpo_fast.plan.model_shape import SHAPES, model_config
from grpo_fast.plan.search import plan
from grpo_fast.plan.sizes import step_sizes
from grpo_fast.plan.trace import Traces

__all__ = [
    "SHAPES",
    "Traces",
    "calibrated",
    "device_budget",
    "longest_prompt",
    "model_config",
    "plan",
    "resolve_auto",
    "step_sizes",
    "traces_of",
]
