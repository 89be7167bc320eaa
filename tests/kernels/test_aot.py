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


def compile_cases(*arguments: str) -> list[Report]:
    """In a process of its own: this one may be interpreted. Triton keeps what it has compiled once."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.aot", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("["), f"{command}\n{done.stdout}\n{done.stderr}"
    return [Report(**row) for row in json.loads(done.stdout)]


def described(faulty: list[Report]) -> str:
    return "\n".join(f"{r.case}: {r.kernel} {r.config}: {'; '.join(r.faults())}" for r in faulty)


def test_every_shipped_kernel_fits_hopper_without_spills_and_on_its_tensor_cores():
    rows = compile_cases()

    faulty = [row for row in rows if row.faults()]
    assert not faulty, described(faulty)
    assert {"_pair_gradient", "_weight_gradient", "forward_kernel", "logit_gradient_kernel"} <= {
        row.kernel for row in rows if row.dots
    }


@pytest.mark.parametrize("capability", [80, 89])
def test_the_pointer_path_fits_ampere_and_ada(capability):
    rows = compile_cases("--capability", str(capability), "--only", ", bfloat16")

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
