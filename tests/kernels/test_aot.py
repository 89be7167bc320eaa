"""Every kernel the head launches, compiled ahead of time: the compiler does not check these by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.aot import CompiledKernel, compile_only, read_record, record_path, save, table, verdict
from benchmarks.machine_code import Loops, loops, resident_programs
from benchmarks.readme import render
from benchmarks.tables import DASH

ROOT = Path(__file__).resolve().parents[2]

SMALL = ("sm_80", "sm_89", "gfx942")
SOUND = CompiledKernel(
    case="forward", kernel="k", config="ROWS=128 warps=8", architecture="sm_90", registers=164, spills=0,
    shared=200_000, ctas=2, dots=1, tensor_core=4, step=109, epilogue=996, instructions=1612,
)  # fmt: skip

pytestmark = pytest.mark.timeout(1800)  # a busy machine that has compiled none of them before

_PROGRAM = """
import json
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from triton.runtime.jit import JITFunction
from benchmarks import tune
from benchmarks.aot import BATCHES, compile_only, policy_loss, reports, shipped_cases
from benchmarks.dry_head import step
from benchmarks.machine_code import read
from grpo_fast.head import tuning
from grpo_fast.head.fused_loss import loss_constants
from grpo_fast.kernels.policy_facts import PolicyBatch
from grpo_fast.kernels.policy_loss import policy_loss as launch
from grpo_fast.objective import GRPOLossConfig

TRANSFORMED = [f"{case}, bias, temperature, softcap" for case in ("certified", "exact", "gradients")]
OTHERS = "sm_80", "sm_100", "gfx942"
TOKENS = (1, 2, 16, 500, 16_383, 65_536)
STEPS = (step, partial(step, exact=True), partial(step, exact=True, keep=True))


def compiled(architecture, *parts):
    cases = {name: run for name, run in shipped_cases(architecture).items() if any(p in name for p in parts)}
    return [asdict(report) for report in reports(architecture, cases)]


def counted(*names):
    with compile_only("sm_90") as compiled:
        step(BATCHES["bfloat16"], "sm_90")
    cubins = {kernel.fn.__name__: binary.asm["cubin"] for kernel, binary, _ in compiled}
    return [read(cubins[name], disassemble=True)[-1] for name in names]


def tuned():
    sizes = tuning.load_tables()["sm_90"].sizes("half", 2048, True)
    narrow = tune.changed(sizes, tune.FORWARD, {"warps": 4})
    return [tune.compile_one("sm_90", tune.SHAPES[0], of) for of in (sizes, narrow)]


def remember(self, key, signature, device, *_):
    self.device_caches[device][0][key] = SimpleNamespace(hash=key)
    return self.device_caches[device][0][key]


def variants(architecture, launches):
    # How many of each kernel the launches need, by Triton's own cache keys; none is compiled.
    with mock.patch.object(JITFunction, "_do_compile", remember), compile_only(architecture) as compiled:
        for launch in launches:
            launch()
        return Counter(name for name, _ in {(kernel.fn.__name__, stub.hash) for kernel, stub, _ in compiled})


def over_tokens(architecture, name):
    batches = [replace(BATCHES[name], rows=rows) for rows in TOKENS]
    steps = STEPS[:2] if batches[0].softcap else STEPS
    return variants(architecture, [partial(run, batch, architecture) for batch in batches for run in steps])


def loss_of_slice(start):
    part, dtypes = slice(start, 20 + 2 * start), (torch.float32, torch.int64, torch.bool)
    row, ids, mask = (torch.zeros(64, dtype=dtype)[part] for dtype in dtypes)
    constants = loss_constants(GRPOLossConfig(loss_type="grpo", beta=0.1), None)
    launch(PolicyBatch(row, row, ids, mask, row, row, row, row, 1 + start), constants)


names = ("bfloat16", "temperature", "bias, temperature, softcap")
sizes = ((16_384, 64), (1000, 1), (777, 13), (1, 1))
found = {
    "hopper": compiled("sm_90", ", bfloat16", *TRANSFORMED, "loss, grpo"),
    "counted": counted("forward_kernel", "finalise_kernel"),
    "others": [row for name in OTHERS for row in compiled(name, "certified, bfloat16", "certified, V=50257")],
    "tuned": tuned(),
    "heads": [*(over_tokens("sm_90", name) for name in names), over_tokens("sm_80", "bfloat16")],
    "loss": variants("sm_90", [partial(policy_loss, {"loss_type": "dapo"}, *size) for size in sizes]),
    "slices": variants("sm_90", [partial(loss_of_slice, start) for start in (0, 1, 2, 4, 16)]),
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    """What the compiler made of the usual head, one with everything and a loss; all: `benchmarks aot`.

    In a process of its own: this one may be interpreted. Triton keeps what it has compiled once.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_kernels_fit_gpus_of_both_makers_without_spills_and_on_their_matrix_cores(found):
    rows = [CompiledKernel(**row) for row in (*found["hopper"], *found["others"])]

    assert [(r.case, r.kernel, r.config, r.faults()) for r in rows if r.faults()] == []
    assert {"_pair_gradients", "_weight_gradient", "forward_kernel", "logit_gradient_kernel"} <= {
        row.kernel for row in rows if row.dots
    }
    assert {row.architecture for row in rows} == {"sm_80", "sm_90", "sm_100", "gfx942"}


def test_no_kernel_needs_more_of_hopper_than_its_record(found):
    if not record_path("sm_90").exists():
        pytest.skip("no record of this Triton")
    record = read_record(record_path("sm_90").read_text())

    verdicts = {
        (row["case"], row["kernel"]): verdict(CompiledKernel(**row), record) for row in found["hopper"]
    }

    assert {what: ships for what, ships in verdicts.items() if ships not in ("yes", "new")} == {}


def test_rows_of_logits_are_written_and_read_in_whole_vectors(found):
    """A width whose divisibility the compiler does not know moves two bytes a thread: eight times as many."""
    whole = [CompiledKernel(**row) for row in found["hopper"] if row["case"].endswith(", bfloat16")]
    wide = {"forward_kernel", "logit_gradient_kernel", "hidden_kernel", "target_rows_kernel"}

    writers = [row for row in whole if row.kernel in wide]

    assert {row.kernel for row in writers} == wide and any("kept" in row.case for row in writers)
    assert not [row for row in writers if row.narrow]


def test_no_kernel_is_compiled_twice_however_many_tokens_a_batch_has_and_wherever_it_begins(found):
    heads, loss, slices = found["heads"], found["loss"], found["slices"]

    for one in heads:
        assert {"forward_kernel", "_pair_gradients", "_hidden_gradient", "logit_gradient_kernel"} <= set(one)
    assert len(heads) == 4 and "_sequence_loss" in loss and len(slices) == 3
    for one in (*heads, loss, slices):
        one["forward_kernel"] = one.get("forward_kernel", 1) - ("settle_kernel" in one)
        assert set(one.values()) == {1}, one


def test_the_tuners_candidates_are_compiled_without_a_gpu(found):
    fine, narrow = found["tuned"]

    assert fine == []
    assert narrow and "spills" in narrow[0]


def test_a_product_has_a_step_and_an_epilogue_and_a_kernel_without_one_its_instructions(found):
    (instructions, step, epilogue), without = found["counted"]

    assert 4 < step < 300 < epilogue < instructions - step
    assert without[0] > 100 and 4 < without[1] < without[0] and without[2] == 0


_SASS = """
/*0000*/  MOV R1, c[0x0][0x28] ;
/*0010*/  @P0 BRA 0x30 ;
/*0020*/  MOV R3, R4 ;
/*0030*/  HGMMA.64x256x16.F32.BF16 R24, gdesc[UR32], R24 ;
/*0040*/  HGMMA.64x256x16.F32.BF16 R24, gdesc[UR36], R24 ;
/*0050*/  @!P1 BRA 0x80 ;
/*0060*/  @P2 EXIT ;
/*0070*/  CALL.REL.NOINC 0xb0 ;
/*0080*/  BRA.U UP0, 0x10 ;
/*0090*/  EXIT ;
/*00a0*/  NOP;
/*00b0*/  RET.REL.NODEC R2 0x0 ;
"""


def test_the_loop_of_the_products_is_told_from_the_loop_of_the_tiles():
    assert loops(_SASS) == Loops(instructions=11, step=5, epilogue=3)
    assert loops(_SASS.replace("HGMMA", "FFMA")) == Loops(11, 8, 0)
    assert loops(_SASS[: _SASS.index("/*0050*/")]) == Loops(5, 0, 0)


def test_a_multiprocessor_holds_what_registers_shared_memory_and_warps_leave_room_for():
    kernels = [
        (8, 128, 98_304),
        (8, 129, 98_304),
        (8, 128, 115_712),
        (8, 128, 115_713),
        (4, 40, 0),
        (4, 9, 0),
    ]

    assert [resident_programs("sm_90", *kernel) for kernel in kernels] == [2, 1, 2, 1, 12, 16]
    assert [resident_programs(each, 4, 16, 0) for each in SMALL] == [16, 12, 8]
    assert [resident_programs(each, 1, 16, 0) for each in SMALL] == [32, 24, 32]


@pytest.mark.parametrize(
    ("changes", "ships"),
    [
        ({"registers": 172, "epilogue": 1045, "instructions": 100, "ctas": 3}, "yes"),
        ({"registers": 173, "step": 115}, "registers 164 -> 173; step 109 -> 115"),
        ({"epilogue": 1046}, "epilogue 996 -> 1,046"),
        ({"ctas": 1, "spills": 4}, "spills (4 instructions); ctas 2 -> 1"),
        ({"spills": 5}, "spills (5 instructions); spills 0 -> 5"),
        ({"shared": 232_449}, "shared memory 232449 > 232448; shared 200,000 -> 232,449"),
        ({"tensor_core": 0}, "no wgmma.mma_async for a tl.dot"),
        ({"tensor_core": 0, "dots": 0}, "yes"),
        ({"architecture": "sm_89", "shared": 101_377}, "shared memory 101377 > 101376"),
        ({"kernel": "another"}, "new"),
    ],
)
def test_a_kernel_is_held_to_what_ships_and_to_its_record(changes, ships):
    record = read_record(f"Compiled.\n\n{table([SOUND], ['yes'])}\n\n| another | table |")

    assert verdict(replace(SOUND, **changes), record) == ships
    assert verdict(SOUND, record) == verdict(SOUND, None) == "yes"


def test_an_interpreted_process_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    with pytest.raises(RuntimeError, match="unset it"), compile_only("sm_90"):
        raise AssertionError


def test_summaries_of_other_compilers_stay_and_stand_beside_one_another(tmp_path):
    path, found = tmp_path / "aot.json", {"kernels": 125, "faulty": 0}
    older, newer = ({"architecture": "gfx942", "triton": f"3.{minor}.0"} for minor in (5, 9))

    save(path, [older | found, older | found | {"architecture": "sm_90"}])
    save(path, [newer | found | {"faulty": 3}])
    save(path, [older | found | {"faulty": 1}])

    shown = render(path, "link").splitlines()
    assert shown[0] == "| architecture | Triton 3.5.0 | Triton 3.9.0 |"
    assert shown[2:4] == ["| gfx942 | 125 · 1 | 125 · 3 |", f"| sm_90 | 125 · 0 | {DASH} |"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--record"], "--record takes one --architecture"),
        (["--record", "--architecture", "sm_90", "--only", "bfloat16"], "leave out --only"),
        (["--json", "found.json", "--only", "bfloat16"], "leave out --only"),
        (["--only", "bfloat61"], "--only bfloat61 is in no case's name; there are bfloat16,"),
    ],
)
def test_what_would_record_a_part_or_compile_nothing_is_refused(options, message, capsys):
    assert main(["aot", *options]) == 2

    assert message in capsys.readouterr().err
