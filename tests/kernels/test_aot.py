"""Ahead-of-time compilation of a sample of the kernels; `aot.py` compiles all of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import aot

HERE = Path(__file__).resolve().parent
HEAD = {"forward_kernel", "_pair_gradients", "_hidden_gradient", "logit_gradient_kernel"}
pytestmark = pytest.mark.timeout(1800)  # a busy machine that has compiled none of them before
USUAL = ("sparse, bfloat16", "exact, bfloat16", "policy loss, grpo with everything")
_PROGRAM = """
import json, sys
from functools import partial
import torch
import aot
from grpo_fast.head.fused_loss import loss_constants
from grpo_fast.kernels.policy_facts import PolicyBatch
from grpo_fast.kernels.policy_loss import policy_loss as launch

TOKENS = (1, 2, 16, 500, 16_383, 65_536)

def over_tokens(name):
    heads = [aot.head(**aot.HEADS[name], rows=rows) for rows in TOKENS]
    runs = [partial(aot.step, head, "sm_90", exact=exact) for head in heads for exact in (False, True)]
    return aot.variants("sm_90", runs)

def loss_of_slice(start):
    part, dtypes = slice(start, 20 + 2 * start), (torch.float32, torch.int64, torch.bool)
    row, ids, mask = (torch.zeros(64, dtype=dtype)[part] for dtype in dtypes)
    constants = loss_constants(aot.GRPOLossConfig(loss_type="grpo", beta=0.1), None)
    launch(PolicyBatch(row, row, ids, mask, row, row, row, row, 1 + start), constants)

faults = {}
for architecture, cases in json.loads(sys.argv[1]).items():
    faults |= aot.compile_cases(architecture, cases)
sizes = ((16_384, 64), (1000, 1), (777, 13), (1, 1))
heads = [over_tokens(name) for name in ("bfloat16", "bias, temperature, softcap")]
losses = [aot.variants("sm_90", [partial(aot.policy_loss, {"loss_type": "dapo"}, *size) for size in sizes]),
          aot.variants("sm_90", [partial(loss_of_slice, start) for start in (0, 1, 2, 4, 16)])]
with aot.compile_only("sm_90") as compiled:
    aot.cases_of("sm_90")["into a float32 gradient, bfloat16"]()
registers = {name: aot.usage(binary)["REG"] for name, binary in compiled}
print(json.dumps({"faults": faults, "heads": heads, "losses": losses, "registers": registers}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Compile the usual cases of Hopper, and others drawn at random, in a process that is not interpreted."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    dice = random.Random(seed)
    asked = {"sm_90": [*USUAL, *dice.sample(sorted(aot.cases_of("sm_90")), 3)]}
    for architecture in dice.sample(sorted(aot.SHARED_MEMORY.keys() - {"sm_90"}), 2):
        asked[architecture] = ["sparse, bfloat16", dice.choice([*aot.cases_of(architecture)])]
    asked[dice.choice(["sm_80", "sm_89"])] = [dice.choice(["sparse, H=20480", "sparse, float32, H=20480"])]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([environment["PYTHONPATH"], str(HERE)])
    command = [sys.executable, "-c", _PROGRAM, json.dumps(asked)]
    done = subprocess.run(command, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, f"{asked}\n{done.stderr}"
    return json.loads(done.stdout)


def test_kernels_fit_every_gpu_without_spills_and_use_its_matrix_cores(found):
    assert len(found["faults"]) > 20
    assert {kernel: wrong for kernel, wrong in found["faults"].items() if wrong} == {}


def test_two_programs_that_add_to_a_float32_gradient_fit_a_multiprocessor(found):
    assert 0 < found["registers"]["_weight_gradient"] <= 128  # of 65,536, by 8 warps


def test_no_kernel_is_compiled_again_for_another_number_of_tokens(found):
    with_bias = found["heads"][1]
    with_bias["_weight_gradient"] -= 1  # one variant for dW, one for dbias
    for kernels in (*found["heads"], *found["losses"]):
        kernels["forward_kernel"] = kernels.get("forward_kernel", 1) - ("zero_invalid_rows" in kernels)
        assert set(kernels.values()) == {1}, kernels
    for kernels in found["heads"]:
        assert kernels.keys() >= HEAD
