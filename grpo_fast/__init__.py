"""grpo_fast: group-relative policy optimisation of language models on custom kernels."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and type checkers see; `__getattr__` gives it at run time
    from grpo_fast.head.api import linear_cross_entropy as linear_cross_entropy
    from grpo_fast.head.api import linear_grpo_loss as linear_grpo_loss
    from grpo_fast.head.api import linear_logprob as linear_logprob
    from grpo_fast.head.outputs import GRPOLossOutput as GRPOLossOutput
    from grpo_fast.head.outputs import HeadOutput as HeadOutput
    from grpo_fast.objective import GRPOLossConfig as GRPOLossConfig
    from grpo_fast.objective import LossInputs as LossInputs
    from grpo_fast.objective import LossOutputs as LossOutputs
    from grpo_fast.objective import StepTotals as StepTotals
    from grpo_fast.run.python import Run as Run
    from grpo_fast.run.python import train as train
    from grpo_fast.run_record.callbacks import Callback as Callback

# In a checkout the kernels lie in their own top-level folder, which must not become an importable
# top-level name: transformers looks for the hub's package of that name. An installed package has
# `grpo_fast/kernels` in place and needs nothing.
_checkout_kernels = Path(__file__).resolve().parent.parent / "kernels"
if (_checkout_kernels / "kernels" / "__init__.py").is_file():
    __path__.append(str(_checkout_kernels))

_PUBLIC = {
    "linear_logprob": "grpo_fast.head.api",
    "linear_cross_entropy": "grpo_fast.head.api",
    "linear_grpo_loss": "grpo_fast.head.api",
    "GRPOLossConfig": "grpo_fast.objective",
    "LossInputs": "grpo_fast.objective",
    "LossOutputs": "grpo_fast.objective",
    "StepTotals": "grpo_fast.objective",
    "GRPOLossOutput": "grpo_fast.head.outputs",
    "HeadOutput": "grpo_fast.head.outputs",
    "train": "grpo_fast.run.python",
    "Run": "grpo_fast.run.python",
    "Callback": "grpo_fast.run_record.callbacks",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Public names load torch when they are first used, not when the package is imported."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
