"""Unsloth's fused log-probabilities. Run only: its licence is the AGPL.

They are loaded from their file alone: the package patches transformers for the whole process when it is
imported, which would change what else is measured, and asks for Unsloth's trainer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from torch import Tensor

from ..problem import Outcome, Problem, Run
from . import Peer

PACKAGE, FILE = "unsloth_zoo", "fused_losses/fused_linear.py"


def prepare(problem: Problem) -> Run:
    logprobs = _logprobs()
    _call_without_package(lambda: logprobs(problem.hidden[:1], problem.weight, problem.targets[:1]))
    shape = (problem.sequences, -1)

    def run() -> Outcome:
        hidden = problem.hidden.view(*shape, problem.hidden.shape[1])
        return problem.finish(logprobs(hidden, problem.weight, problem.targets.view(shape)))

    return run


def _call_without_package(call: Callable[[], object]) -> None:
    """The first call, and no other, imports the package for a bound on its chunks' memory; where it cannot,
    it takes 2 GiB, which is what large cards have anyway."""
    sys.modules[PACKAGE] = None
    try:
        with torch.no_grad():
            call()
    finally:
        del sys.modules[PACKAGE]


@functools.cache
def _logprobs() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Once a process: the file registers its operators with torch."""
    package = find_spec(PACKAGE)
    if package is None:
        raise ImportError(f"No module named {PACKAGE!r}")
    path = Path(package.origin).parent / FILE
    if not path.exists():
        raise ImportError(f"this {PACKAGE} has no {FILE}: install a newer one")
    spec = spec_from_file_location("grpo_fast_benchmarks_unsloth", path)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fused_linear_logprobs


PEERS = (Peer("Unsloth fused log-probabilities", prepare),)
