"""What fits: bytes predicted and measured, the largest group of a device, and what leaves it meanwhile.

Names come when they are asked for: what moves tensors about needs no planner.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "architecture": "shapes",
    "model_config": "shapes",
    "DeviceBudget": "devices",
    "device_budget": "devices",
    "format_bytes": "devices",
    "parse_bytes": "devices",
    "Workload": "setup",
    "Prediction": "prediction",
    "Calibration": "prediction",
    "Plan": "search",
    "plan": "search",
    "predict": "search",
    "Measured": "measure",
    "measure_update": "measure",
    "peak_bytes": "measure",
    "calibrate": "probe",
    "resolve_auto": "auto",
    "planned_kv_cache_bytes": "auto",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
