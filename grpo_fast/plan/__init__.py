"""What fits: bytes predicted and measured, the largest group of a device, and the settings that buy room."""

from __future__ import annotations

from grpo_fast.plan.auto import planned_kv_cache_bytes, resolve_auto
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.measure import calibrate
from grpo_fast.plan.model_shape import SHAPES, model_config
from grpo_fast.plan.search import plan
from grpo_fast.plan.sizes import step_sizes
from grpo_fast.plan.trace import Traces

__all__ = [
    "SHAPES",
    "Traces",
    "calibrate",
    "device_budget",
    "model_config",
    "plan",
    "planned_kv_cache_bytes",
    "resolve_auto",
    "step_sizes",
]
