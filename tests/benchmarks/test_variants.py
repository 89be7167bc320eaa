"""What a user's run compiles does not depend on how many tokens a batch has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import json
from benchmarks import aot_losses
from benchmarks.variants import TOKENS, over_tokens, variants

everything = {"bias": True, "temperature": True, "softcap": 30.0}
print(json.dumps([over_tokens(90, TOKENS, **batch) for batch in ({}, {"temperature": True}, everything)]))
print(json.dumps(over_tokens(80, TOKENS)))

def loss_of(tokens, sequences):
    def launch():
        aot_losses._TOKENS, aot_losses._SEQUENCES = tokens, sequences
        aot_losses.policy_loss_cases()["policy loss, dapo"]()

    return launch

print(json.dumps(variants(90, [loss_of(*size) for size in ((16_384, 64), (1000, 1), (777, 13), (1, 1))])))
"""


def test_no_kernel_is_compiled_twice_over_batches_of_many_sizes_and_temperatures():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    hopper, ampere, loss = map(json.loads, done.stdout.splitlines())

    for found in (*hopper, ampere):
        assert {"forward_kernel", "_pair_gradient", "_hidden_gradient", "logit_gradient_kernel"} <= set(found)
    assert "_sequence_loss" in loss
    for found in (*hopper, ampere, loss):
        assert set(found.values()) == {1}, found
