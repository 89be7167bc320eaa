"""What the emulator catches: small kernels with one fault each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import launch as launcher
from tests.emulator import threads
from tests.emulator.ptx import Fault

PROGRAM = """
.visible .entry kernel(.param .u64 kernel_param_0, .param .u32 kernel_param_1)
{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b32 %r1, [kernel_param_1];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd3, %rd1, %rd2;
    shl.b32 %r4, %r2, 2;
    xor.b32 %r5, %r4, 128;
    setp.lt.u32 %p1, %r2, %r1;
    setp.lt.u32 %p2, %r2, 32;
    BODY
$END:
    ret;
}
"""
WRITE, BARRIER, READ = "st.shared.b32 [%r4], %r2;", "bar.sync 0;", "ld.shared.b32 %r6, [%r5];"
WAIT = """{ .reg .pred complete; waitLoop:
    mbarrier.try_wait.parity.shared::cta.b64 complete, [%r7], 0;
    @!complete bra.uni waitLoop; }"""
INITIALIZE = "mov.u32 %r7, 128; @%p2 mbarrier.init.shared::cta.b64 [%r7], 1;"
COPY = "@%p1 cp.async.ca.shared.global [%r4], [%rd3], 4; cp.async.commit_group;"
FIRST_WRITES = "setp.eq.u32 %p3, %r3, 0; @%p3 st.global.b32 [%rd1], 7; @%p3 bra $END;"
FAULTS = {
    "a missing mask": ("st.global.b32 [%rd3], %r2;", "global memory, 0 bytes after its end"),
    "a mask off by one": ("setp.le.u32 %p1, %r2, %r1; @%p1 ld.global.b32 %r6, [%rd3];", "0 bytes after its"),
    "shared memory beyond its end": ("st.shared.b32 [%r4+132], %r2;", "shared memory, 0 bytes after its end"),
    "a misaligned load": ("ld.global.b32 %r6, [%rd1+2];", "misaligned access to 4 bytes of global"),
    "no barrier before a read": (f"{WRITE} {READ}", "a warp reads what another has written since"),
    "no barrier after a read": (f"{WRITE} {BARRIER} {READ} st.shared.b32 [%r4], 7;", "warp overwrites what"),
    "two warps write": (f"{WRITE} st.shared.b32 [%r5], 9;", "a warp writes what another has written since"),
    "two programs write": ("@%p1 st.global.b32 [%rd3], %r3;", "a program writes what another has written"),
    "a program reads another's": (f"{FIRST_WRITES} ld.global.b32 %r6, [%rd1];", "program (reads|overwrites)"),
    "shared memory before it is written": (READ, "read before it is written"),
    "a copy nobody waited for": (f"@!%p1 bra $END; {COPY} ld.shared.b32 %r6, [%r4];", "copy has arrived"),
    "a barrier that a warp skips": ("@%p2 bra $END; bar.sync 0;", "hangs: not all threads"),
    "an mbarrier that nobody completes": (f"{INITIALIZE} {BARRIER} {WAIT}", "hangs: it waits for"),
    "a loop without an end": ("$AGAIN: bra $AGAIN;", "hangs: it has executed"),
    "an unknown instruction": ("tcgen05.fence::before_thread_sync;", "cannot execute it: .*tcgen05"),
}


def launch(body: str, *, count: int = 50, programs: int = 1) -> np.ndarray:
    """Run 64 threads on `count` numbers of 32 bits and 256 bytes of shared memory."""
    data = np.zeros(count, np.int32)
    arguments = [np.int64(data.ctypes.data).tobytes(), np.int32(count).tobytes()]
    ptx, spans = PROGRAM.replace("BODY", body), [(data.ctypes.data, data.nbytes)]
    launcher.Launch(ptx, arguments, (programs, 1, 1), spans, warps=2, shared=256).run()
    return data


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(monkeypatch, name):
    monkeypatch.setattr(threads, "PATIENCE", 1000)
    monkeypatch.setattr(launcher, "TOGETHER", 64)
    body, message = FAULTS[name]

    with pytest.raises(Fault, match=message):
        launch(body, programs=1 + ("program" in name))


def test_threads_that_part_meet_again_and_a_copy_arrives_when_waited_for():
    found = launch(f"""
        and.b32 %r6, %r2, 1; setp.eq.b32 %p3, %r6, 1; @%p3 bra $ODD; add.s32 %r6, %r2, 100; bra $ON;
        $ODD: mul.lo.s32 %r6, %r2, -1; $ON: @%p1 st.global.b32 [%rd3], %r6; {COPY} cp.async.wait_group 0;
        @%p1 ld.shared.b32 %r7, [%r4]; add.s32 %r7, %r7, %r6; @%p1 st.global.b32 [%rd3], %r7;""")

    assert found.tolist() == [-2 * i if i % 2 else 2 * (i + 100) for i in range(50)]
