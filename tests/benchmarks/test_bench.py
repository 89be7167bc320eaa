"""The CPU-sized benchmarks that pytest-benchmark drives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytest_benchmark", reason="install pytest-benchmark")
ROOT = Path(__file__).resolve().parents[2]


def run_pytest(*arguments: str) -> str:
    """In a process of its own, where no worker of this one turns benchmarks off."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_is_compared_with_a_saved_one(tmp_path):
    few = ("benchmarks/bench_cpu.py", "-k", "packing", "--benchmark-only", "--benchmark-max-time=0.05")
    storage = f"--benchmark-storage={tmp_path}"

    run_pytest(*few, storage, "--benchmark-save=before")
    printed = run_pytest(*few, storage, "--benchmark-compare=0001")

    assert "0001_before" in printed
    assert "NOW" in printed


def test_without_being_named_they_are_not_collected(pytestconfig: pytest.Config):
    assert pytestconfig.getini("testpaths") == ["tests"]
    assert not list((ROOT / "tests").rglob("bench_*.py"))
