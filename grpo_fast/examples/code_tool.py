"""A tool with which the model runs Python code: `rollout.tools: [grpo_fast.examples.code_tool:run_python]`.

The code never runs in the trainer's process, but in one of its own with limits. They keep a mistake of the
model's from harming the run. They are no sandbox: docs/environments.md says what they do not keep out.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SECONDS = 10  # by the clock, and of the processor
CHARACTERS = 4000  # of the answer; what is more is left out of its middle
LIMITS = {
    resource.RLIMIT_CPU: SECONDS,
    resource.RLIMIT_FSIZE: 16 * 2**20,  # bytes of a file, and of what is printed
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_NPROC: 0,  # which does not bind root
    resource.RLIMIT_CORE: 0,
}
if sys.platform == "linux":  # macOS refuses this one
    LIMITS[resource.RLIMIT_AS] = 2**30
# A machine's number in the kernel, and its numbers of clone, fork, vfork, clone3, socket, io_uring_setup.
REFUSED_CALLS = {
    "x86_64": (0xC000003E, (56, 57, 58, 435, 41, 425)),
    "aarch64": (0xC00000B7, (220, 435, 198, 425)),
}
# Numeric libraries would start threads, which are refused as processes are.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def run_python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: The program. It starts anew each time, in an empty folder.
    """
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as printed,
    ):
        Path(folder, "main.py").write_text(code, encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            cwd=folder,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        end = ""
        try:
            status = process.wait(SECONDS)
            if status < 0:
                end = f"[ended by {signal.Signals(-status).name}]"
        except subprocess.TimeoutExpired:
            end = f"[stopped after {SECONDS} seconds]"
        finally:
            with suppress(ProcessLookupError, PermissionError):  # it is gone, and so are its children
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        text = printed.read().decode(errors="replace")
        # The same program gives the same answer, whatever its folder is called.
        return _shortened(text.replace(f"{os.path.realpath(folder)}/", "")) + end or "[nothing was printed]"


def _shortened(text: str) -> str:
    """Beginning and end: the end of an error says what it was."""
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _limit() -> None:
    """Bind this process, and what it becomes, for good."""
    for limit, value in LIMITS.items():
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))
    if sys.platform == "linux" and platform.machine() in REFUSED_CALLS:
        _refuse_calls(*REFUSED_CALLS[platform.machine()])


def _refuse_calls(machine: int, calls: tuple[int, ...]) -> None:
    """A seccomp filter: these calls fail with EPERM, and so do all by another machine's numbers."""
    load, equal, at_least, leave = 0x20, 0x15, 0x35, 0x06
    refuse = 5 + len(calls)  # the last instruction; jumps count from the next one
    program = [
        (load, 0, 0, 4),
        (equal, 0, refuse - 2, machine),
        (load, 0, 0, 0),
        (at_least, refuse - 4, 0, 2**30),  # x86's numbers for 32-bit pointers
        *((equal, refuse - place, 0, call) for place, call in enumerate(calls, 5)),
        (leave, 0, 0, 0x7FFF0000),
        (leave, 0, 0, 0x00050001),
    ]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    filtering = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(text)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    no_new_privileges, set_filter = (38, 1, 0, 0, 0), (22, 2, ctypes.addressof(filtering), 0, 0)
    if prctl(*no_new_privileges) or prctl(*set_filter):
        raise OSError(ctypes.get_errno(), "this system takes no seccomp filter")


if __name__ == "__main__":  # the process of its own, which becomes the model's program
    _limit()
    os.execv(sys.executable, [sys.executable, "-I", "-X", "utf8", "main.py"])
