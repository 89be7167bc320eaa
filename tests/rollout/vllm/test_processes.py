"""Tests in other processes: two ranks, and a vLLM that returns routed experts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(script: str, folder: Path, **environment: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder)]
    settings = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, **settings)
    assert done.returncode == 0, done.stderr[-6000:]


def test_two_ranks_with_a_vllm_each_or_one_together_sample_the_policy(on_vllms_cpu, saved_model):
    run("vllm_ranks.py", saved_model(heads=2))


def test_vllm_returns_the_experts_that_the_policy_would_choose(on_vllms_cpu, saved_kind):
    run("vllm_experts.py", saved_kind("qwen3_moe"), TRITON_INTERPRET="1")  # read where Triton is imported
