"""Each kernel alone, under the interpreter: that it runs, and counts its work; no time means anything."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import rows
from benchmarks.contest import Contest, Limits
from benchmarks.kernels import ON_CUDA, KernelInputs
from benchmarks.measure import FAILED, SKIPPED
from benchmarks.problem import FORWARD_BACKWARD, Setting
from benchmarks.rows import Sources

pytest.importorskip("triton")
SETTING = Setting("peaked", 16, 16, 130, FORWARD_BACKWARD, True, "float32")


def test_every_kernel_runs_on_what_those_before_it_made(monkeypatch, device):
    monkeypatch.setattr(rows, "_MOST_PROBLEMS", 1)
    inputs = KernelInputs(SETTING, Sources(), device, seed=0)
    entrants = [inputs.entrant(name, case) for name, case in ON_CUDA.items()]
    contest = Contest({}, entrants, device, memory=False)

    contest.measure(Limits(time.monotonic() + 600, rounds=1))

    found = {result.implementation: result for result in contest.results()}
    # csrc/ has nothing for float32.
    in_library = {name for name, case in ON_CUDA.items() if case.in_cuda_library}
    assert {name for name, result in found.items() if result.status == SKIPPED} == in_library
    assert {result.reason for result in found.values() if result.status == FAILED} == set()
    product = 2 * 16 * 16 * 130  # N H V
    for name, products in (("forward", 1), ("dX, dense", 2), ("dX and dW, dense", 3)):
        rate = products * product / found[name].seconds[0]
        assert found[name].metrics["flops_per_second"] == pytest.approx(rate)
    assert 0 < found["dX, sparse"].metrics["density"] <= 1


def test_batches_take_turns_so_that_none_is_found_in_the_cache():
    batches = KernelInputs(SETTING, Sources(), torch.device("cpu"), seed=0).batches

    assert len(batches) == rows._MOST_PROBLEMS
    assert not torch.equal(batches[0].hidden, batches[1].hidden)
