"""Every kernel the head launches, compiled ahead of time: the compiler does not check these by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.aot import Report

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(1800)  # a busy machine that has compiled none of them before


def compile_cases(*arguments: str) -> list[Report]:
    """In a process of its own: this one may be interpreted. Triton keeps what it has compiled once."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.aot", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("["), f"{command}\n{done.stdout}\n{done.stderr}"
    return [Report(**row) for row in json.loads(done.stdout)]


def described(faulty: list[Report]) -> str:
    return "\n".join(f"{r.case}: {r.kernel} {r.config}: {'; '.join(r.faults())}" for r in faulty)


@pytest.fixture(scope="module")
def hopper() -> list[Report]:
    """The usual head, one with everything, two losses; `python -m benchmarks aot` compiles all."""
    return compile_cases("--only", ", bfloat16", ", bias, temperature, softcap", "loss, grpo", "loss, gspo")


def test_the_kernels_fit_hopper_without_spills_and_on_its_tensor_cores(hopper):
    faulty = [row for row in hopper if row.faults()]
    assert not faulty, described(faulty)
    assert {"_pair_gradient", "_weight_gradient", "forward_kernel", "logit_gradient_kernel"} <= {
        row.kernel for row in hopper if row.dots
    }


def test_rows_of_logits_are_written_and_read_in_whole_vectors(hopper):
    """A width whose divisibility the compiler does not know moves two bytes a thread: eight times as many."""
    writers = [
        row
        for row in hopper
        if row.case.endswith(", bfloat16")
        and ("KEEP=1" in row.config or (row.kernel in ("logit_gradient_kernel", "kept_gradient_kernel")))
    ]

    assert {row.kernel for row in writers} == {
        "forward_kernel", "logit_gradient_kernel", "kept_gradient_kernel"
    }  # fmt: skip
    assert not [row for row in writers if row.narrow]


_VARIANTS = """
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from triton.runtime.jit import JITFunction
from benchmarks.aot import BATCHES, backward, compile_only, forward, policy_loss
from grpo_fast.head.fused_loss import loss_constants
from grpo_fast.kernels.policy_loss import policy_loss as launch
from grpo_fast.objective import GRPOLossConfig

TOKENS = (1, 2, 15, 16, 500, 1024, 4096, 16_383, 16_384, 65_536, 100_000)
STEPS = (forward, backward, partial(backward, exact=True))
KEEPING = (partial(forward, keep=True), partial(backward, exact=True, keep=True))


def remember(self, key, signature, device, *_):
    self.device_caches[device][0][key] = SimpleNamespace(hash=key)
    return self.device_caches[device][0][key]


def variants(capability, launches):
    # How many of each kernel the launches need, by Triton's own cache keys; none is compiled.
    with mock.patch.object(JITFunction, "_do_compile", remember), compile_only(capability) as compiled:
        for launch in launches:
            launch()
        return Counter(name for name, _ in {(kernel.fn.__name__, stub.hash) for kernel, stub, _ in compiled})


def over_tokens(capability, name):
    batches = [replace(BATCHES[name], rows=rows) for rows in TOKENS]
    steps = STEPS if batches[0].softcap else STEPS + KEEPING
    return variants(capability, [partial(step, batch, capability) for batch in batches for step in steps])


def loss_of_slice(start):
    part, dtypes = slice(start, 20 + 2 * start), (torch.float32, torch.int64, torch.bool)
    row, ids, mask = (torch.zeros(64, dtype=dtype)[part] for dtype in dtypes)
    constants = loss_constants(GRPOLossConfig(loss_type="grpo", beta=0.1), None)
    launch(row, row, ids, mask, row, row, row, row, 1 + start, constants)


for name in ("bfloat16", "temperature", "bias, temperature, softcap"):
    print(json.dumps(over_tokens(90, name)))
print(json.dumps(over_tokens(80, "bfloat16")))
sizes = ((16_384, 64), (1000, 1), (777, 13), (1, 1))
print(json.dumps(variants(90, [partial(policy_loss, {"loss_type": "dapo"}, *size) for size in sizes])))
print(json.dumps(variants(90, [partial(loss_of_slice, start) for start in (0, 1, 2, 4, 16)])))
"""


def test_no_kernel_is_compiled_twice_however_many_tokens_a_batch_has_and_wherever_it_begins():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _VARIANTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    *heads, loss, of_slices = map(json.loads, done.stdout.splitlines())

    for found in heads:
        assert {"forward_kernel", "_pair_gradient", "_hidden_gradient", "logit_gradient_kernel"} <= set(found)
    assert len(heads) == 4 and "_sequence_loss" in loss and len(of_slices) == 3
    for found in (*heads, loss, of_slices):
        found["forward_kernel"] = found.get("forward_kernel", 1) - ("kept_gradient_kernel" in found)
        assert set(found.values()) == {1}, found


def test_the_pointer_path_fits_ampere():
    rows = compile_cases("--capability", "80", "--only", "forward, bfloat16", "sparse, bfloat16")

    faulty = [row for row in rows if row.faults()]
    assert rows and not faulty, described(faulty)


def report(**changes) -> Report:
    sound = {
        "case": "forward", "kernel": "k", "config": "", "capability": 90, "registers": 168, "spills": 0,
        "shared": 232_448, "dots": 1, "tensor_core": 4,
    }  # fmt: skip
    return Report(**sound | changes)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"spills": 2}, "spills (2 local memory instructions)"),
        ({"shared": 232_449}, "shared memory 232449 > 232448"),
        ({"tensor_core": 0}, "no HGMMA for a tl.dot"),
        ({"capability": 89, "shared": 101_377}, "shared memory 101377 > 101376"),
    ],
)
def test_a_fault_is_named(changes, fault):
    assert report(**changes).faults() == [fault]


def test_a_sound_kernel_and_one_without_products_have_no_faults():
    assert report().faults() == []
    assert report(dots=0, tensor_core=0).faults() == []


def test_an_interpreted_process_is_refused():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "benchmarks.aot", "--only", "forward, bfloat16"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert done.returncode
    assert "unset it" in done.stderr
