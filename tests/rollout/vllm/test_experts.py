"""Which experts vLLM tells, in a process of its own: Triton is there or not when vLLM is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_vllm_tells_each_tokens_experts_which_the_policy_would_choose_and_computes_with(
    on_vllms_cpu, saved_kind
):
    script = Path(__file__).with_name("vllm_experts.py")
    command = [sys.executable, str(script), str(saved_kind("qwen3_moe"))]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
