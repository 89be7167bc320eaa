"""A tool with which the model runs Python code: `rollout.tools: [grpo_fast.examples.code_tool:run_python]`.

The code never runs in the trainer's process, but in one of its own with limits. They keep a mistake of the
model's from harming the run. docs/environments.md says what they do not keep out.
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
# A machine's number in the kernel, and its numbers of the calls below, in their order.
MACHINES = {
    "x86_64": (
        0xC000003E,
        (56, 57, 58, 435, 41, 425, 101, 424, 434, 438, 440, 448, 141, 251),
        (62, 200, 234, 129, 297, 302, 310, 311, 142, 144, 203, 314, 256, 279),
        (72, 16),
    ),
    "aarch64": (
        0xC00000B7,
        (220, 435, 198, 425, 117, 424, 434, 438, 440, 448, 140, 30),
        (129, 130, 131, 138, 240, 261, 270, 271, 118, 119, 122, 274, 238, 239),
        (25, 29),
    ),
}
# Refused: clone, fork and vfork (not of aarch64), clone3, socket, io_uring_setup, ptrace, pidfd_send_signal,
# pidfd_open, pidfd_getfd, process_madvise, process_mrelease, setpriority, ioprio_set.
# Of the program itself alone, which their first argument says: kill, tkill, tgkill, rt_sigqueueinfo,
# rt_tgsigqueueinfo, prlimit64, process_vm_readv and _writev, sched_setparam, sched_setscheduler,
# sched_setaffinity, sched_setattr, migrate_pages, move_pages.
# Not with these second arguments, by which the kernel signals whom a file names: fcntl, ioctl.
OWNERS = ((8, 15), (0x8901, 0x8902))
# What the program reads beside Python itself, where the kernel has Landlock.
READABLE = (
    *("/usr", "/lib", "/lib64", "/bin", "/etc", "/nix", "/sys/devices/system"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
)
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
    if sys.platform == "linux" and platform.machine() in MACHINES:
        if _prctl(38, 1, 0, 0, 0):  # no new privileges, without which neither of these is taken
            raise OSError(ctypes.get_errno(), "this system does not forbid new privileges")
        _keep_to_folder()
        _refuse_calls(*MACHINES[platform.machine()])


def _prctl(*arguments: int) -> int:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return int(prctl(*arguments))


def _landlock(call: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(444 + call), *arguments))


def landlock_version() -> int:
    """Of the kernel's Landlock; below 1 where there is none."""
    return _landlock(0, None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def _keep_to_folder() -> None:
    """Landlock: this process writes in its folder alone, reads what programs need, and reaches no others."""
    if (version := landlock_version()) < 1:
        return
    every = 2 ** {1: 13, 2: 14}.get(version, 15) - 2  # rights to files; running one is left free
    read, of_file = 4 | 8, every & (2 | 4 | 1 << 14)  # write, read, truncate
    handled = struct.pack("QQQ", every, 0, 3)  # abstract sockets and signals, too
    rules = _landlock(0, handled, ctypes.c_size_t(24 if version >= 6 else 8), ctypes.c_uint32(0))
    if rules < 0:
        raise OSError(ctypes.get_errno(), "Landlock takes no rules")
    rights = {path: read for path in (*READABLE, sys.prefix, sys.base_prefix, *sys.path)}
    for path, allowed in {**rights, "/dev/null": every, ".": every}.items():
        if not os.path.exists(path):
            continue
        file = os.open(path, os.O_PATH)
        allowed &= every if os.path.isdir(path) else of_file
        if _landlock(1, rules, 1, struct.pack("=Qi", allowed, file), ctypes.c_uint32(0)):
            raise OSError(ctypes.get_errno(), "Landlock takes no rule", path)
        os.close(file)
    if _landlock(2, rules, ctypes.c_uint32(0)):
        raise OSError(ctypes.get_errno(), "Landlock is not entered")
    os.close(rules)


def _refuse_calls(
    machine: int, refused: tuple[int, ...], of_itself: tuple[int, ...], of_files: tuple[int, ...]
) -> None:
    """A seccomp filter: these calls fail with EPERM, and so do all by another machine's numbers."""
    load, equal, at_least, leave = 0x20, 0x15, 0x35, 0x06
    allow, refuse = (leave, 0, 0, 0x7FFF0000), (leave, 0, 0, 0x00050001)

    def when(
        call: int, argument: int, values: tuple[int, ...], *ends: tuple[int, ...]
    ) -> list[tuple[int, ...]]:
        """What becomes of a call whose argument is one of these values, and of others."""
        tests = [(equal, len(values) - place, 0, value) for place, value in enumerate(values)]
        return [(equal, 0, len(values) + 3, call), (load, 0, 0, 16 + 8 * argument), *tests, *ends[::-1]]

    program = [
        *((load, 0, 0, 4), (equal, 1, 0, machine), refuse, (load, 0, 0, 0)),
        *((at_least, 0, 1, 2**30), refuse),  # x86's numbers for 32-bit pointers
        *(line for call in refused for line in ((equal, 0, 1, call), refuse)),
        *(line for call in of_itself for line in when(call, 0, (0, os.getpid()), allow, refuse)),
        *(
            line
            for call, owners in zip(of_files, OWNERS, strict=True)
            for line in when(call, 1, owners, refuse, allow)
        ),
        allow,
    ]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    filtering = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(text)))
    if _prctl(22, 2, ctypes.addressof(filtering), 0, 0):
        raise OSError(ctypes.get_errno(), "this system takes no seccomp filter")


if __name__ == "__main__":  # the process of its own, which becomes the model's program
    _limit()
    os.execv(sys.executable, [sys.executable, "-I", "-X", "utf8", "main.py"])
