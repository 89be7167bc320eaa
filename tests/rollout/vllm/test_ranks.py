"""Two real ranks, each with a vLLM or with one between them, agree with their policies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_two_ranks_with_a_vllm_each_or_one_between_them_draw_the_policys_completions_and_outlive_it(
    on_vllms_cpu, saved_model
):
    script = Path(__file__).with_name("vllm_ranks.py")
    command = [sys.executable, str(script), str(saved_model(heads=2))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
