"""grpo_fast: group-relative policy optimization of language models on custom kernels."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and type checkers see; `__getattr__` gives it at run time
    from grpo_fast.head.api import linear_cross_entropy as linear_cross_entropy
    from grpo_fast.head.api import linear_grpo_loss as linear_grpo_loss
    from grpo_fast.head.api import linear_kl as linear_kl
    from grpo_fast.head.api import linear_logprob as linear_logprob
    from grpo_fast.head.outputs import GRPOLossOutput as GRPOLossOutput
    from grpo_fast.head.outputs import HeadOutput as HeadOutput
    from grpo_fast.head.outputs import KLOutput as KLOutput
    from grpo_fast.objective import GRPOLossConfig as GRPOLossConfig
    from grpo_fast.objective import LossInputs as LossInputs
    from grpo_fast.objective import LossOutputs as LossOutputs
    from grpo_fast.objective import StepTotals as StepTotals
    from grpo_fast.record.callbacks import Callback as Callback
    from grpo_fast.run.python import Run as Run
    from grpo_fast.run.python import train as train
    from grpo_fast.run.trl import FastLanguageModel as FastLanguageModel
    from grpo_fast.run.trl import GRPOConfig as GRPOConfig
    from grpo_fast.run.trl import GRPOTrainer as GRPOTrainer

    __version__: str

# OpenMP's threads spin while they wait for each other. On a busy machine they take the cores from the threads
# that they wait for, which makes two threads ten times slower than one. torch reads this when it is imported.
if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}  # GNU's, of torch's Linux wheels

# In a checkout the kernels lie in the top-level folder `kernels/`. It has no `__init__.py`, as transformers
# imports the hub's package of that name. Hence the inner folder: without it the whole repository would be on
# this path, and import-linter would read all of it; a symbolic link would hide the kernels from it.
# An installed package has `grpo_fast/kernels` in place and needs nothing.
_checkout_kernels = Path(__file__).resolve().parent.parent / "kernels"
if (_checkout_kernels / "kernels" / "__init__.py").is_file():
    __path__.append(str(_checkout_kernels))

_PUBLIC = {
    "head.api": ["linear_logprob", "linear_cross_entropy", "linear_grpo_loss", "linear_kl"],
    "head.outputs": ["GRPOLossOutput", "HeadOutput", "KLOutput"],
    "objective": ["GRPOLossConfig", "LossInputs", "LossOutputs", "StepTotals"],
    "run.python": ["Run", "train"],
    "run.trl": ["FastLanguageModel", "GRPOConfig", "GRPOTrainer"],
    "record.callbacks": ["Callback"],
}

__all__ = [name for names in _PUBLIC.values() for name in names]

if not TYPE_CHECKING:
    from grpo_fast.config.lookup import lazy_names, trainer_missing

    _public_name = lazy_names(__name__, _PUBLIC)

    def __getattr__(name: str) -> Any:
        if name == "__version__":  # a checkout that is not installed has none
            from importlib.metadata import version

            return version("grpo-fast")
        try:
            return _public_name(name)
        except ModuleNotFoundError as error:
            if problem := trainer_missing(error):
                raise ImportError(f"grpo_fast.{name} {problem}") from error
            raise


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
