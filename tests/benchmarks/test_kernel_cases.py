"""The kernels' cases under the interpreter: that they run, and count their work; no time means anything."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import kernel_cases
from benchmarks.cell import Limits
from benchmarks.contest import Contest
from benchmarks.kernel_cases import (
    ON_CPU,
    ON_CUDA,
    SELECT_CUDA,
    SPARSE_HIDDEN_CUDA,
    KernelInputs,
    entrants,
)
from benchmarks.problem import FORWARD_BACKWARD, Setting
from benchmarks.record import FAILED, SKIPPED
from benchmarks.row_sources import Sources

pytest.importorskip("triton")
SETTING = Setting("peaked", 16, 16, 130, FORWARD_BACKWARD, True, "float32")


def test_every_kernel_runs_on_what_those_before_it_made(monkeypatch, device):
    monkeypatch.setattr(kernel_cases, "_MOST_INPUTS", 1)
    inputs = KernelInputs(SETTING, Sources(), device, seed=0)
    contest = Contest({}, entrants(inputs, ON_CUDA), device, memory=False)

    contest.measure(Limits(time.monotonic() + 600, rounds=1))

    found = {result.implementation: result for result in contest.results()}
    # csrc/ has nothing for float32.
    assert {name for name, result in found.items() if result.status == SKIPPED} == {
        SELECT_CUDA,
        SPARSE_HIDDEN_CUDA,
    }
    assert {result.reason for result in found.values() if result.status == FAILED} == set()
    product = 2 * 16 * 16 * 130  # N H V
    assert found["forward"].metrics["flops_per_second"] == pytest.approx(
        product / found["forward"].seconds[0]
    )
    both = found["dX and dW, dense"]
    assert both.metrics["flops_per_second"] == pytest.approx(3 * product / both.seconds[0])
    assert 0 < found["dX, sparse"].metrics["density"] <= 1


def test_batches_take_turns_so_that_none_is_found_in_the_cache():
    inputs = KernelInputs(SETTING, Sources(), torch.device("cpu"), seed=0)

    turns = inputs.rotate()

    assert len(inputs.batches) == kernel_cases._MOST_INPUTS
    assert len({id(next(turns)) for _ in inputs.batches}) == len(inputs.batches)
    assert not torch.equal(inputs.batches[0].hidden, inputs.batches[1].hidden)


def test_there_is_a_case_for_every_name():
    assert set(kernel_cases._CASES) == {*ON_CUDA, *ON_CPU}
