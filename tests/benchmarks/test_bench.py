"""The CPU-sized benchmarks that pytest-benchmark drives."""

from __future__ import annotations

import pytest

pytest.importorskip("pytest_benchmark", reason="install pytest-benchmark")

from benchmarks import bench_cpu
from grpo_fast.objective.catalog import LOSS_TYPES


def once(run, *arguments, **options) -> None:
    """As pytest-benchmark's fixture, untimed."""
    run(*arguments, **options)


def test_each_of_them_runs():
    for loss_type in LOSS_TYPES:
        bench_cpu.test_loss(once, loss_type)
    for scale_rewards in ("group", "batch", "none"):
        bench_cpu.test_advantages(once, scale_rewards)
