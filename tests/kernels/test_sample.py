"""A sample of the kernel tests on compiled code; `make test-compiled` runs all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent


@pytest.mark.timeout(1800)  # a busy machine that has compiled none of them before
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_kernel_tests_pass_on_the_ptx_of(architecture, seed):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"EMULATE": architecture, "SAMPLE": "8", "PYTEST_XDIST_TESTRUNUID": str(seed)}

    command = [sys.executable, "-m", "pytest", KERNELS, "-k", "not mean_over_batches"]  # which draws 18 times
    done = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
