"""The code tool answers the model, and what its code does ends with it."""

from __future__ import annotations

import errno
import platform
import sys
import time
from pathlib import Path

import pytest

from grpo_fast.examples import code_tool
from grpo_fast.examples.code_tool import run_python


def test_the_model_sees_what_its_program_prints_and_the_text_of_its_error():
    assert run_python("print(6 * 7)") == "42\n"
    assert run_python("x = 6") == "[nothing was printed]"
    error = run_python("print('before')\n1 / 0")
    assert error.startswith("before\nTraceback") and error.endswith("ZeroDivisionError: division by zero\n")
    assert error == run_python("print('before')\n1 / 0"), "the folder's name is not in it"
    assert "UnicodeEncodeError" not in run_python("print('\ud800')")


def test_an_endless_loop_is_stopped(monkeypatch):
    monkeypatch.setattr(code_tool, "SECONDS", 1)
    began = time.monotonic()
    assert run_python("print('on', flush=True)\nwhile True: pass").endswith("[stopped after 1 seconds]")
    assert time.monotonic() - began < 8


@pytest.mark.skipif(sys.platform != "linux", reason="macOS limits less")
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("held = bytearray(2**31)", "MemoryError"),
        ("open('large', 'wb').write(bytes(2**25))", "File too large"),
        ("files = [open(str(n), 'w') for n in range(100)]", "Too many open files"),
        # Were it not refused, the others would only sleep.
        ("import os, time\nfor _ in range(20):\n    if not os.fork(): time.sleep(600)", "Error"),
        ("import subprocess\nsubprocess.run(['sleep', '600'])", "Error"),
        ("import threading\nthreading.Thread(target=print).start()", "can't start new thread"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "PermissionError"),
    ],
)
def test_what_takes_too_much_fails_in_the_program(code, error):
    answer = run_python(code)
    assert "Traceback" in answer and error in answer.splitlines()[-1]


def test_a_long_output_is_cut_in_its_middle():
    answer = run_python("print('begin', 'x' * 10**6, 'end')")
    assert answer.startswith("begin x") and answer.endswith("x end\n") and "left out" in answer
    assert len(answer) < code_tool.CHARACTERS + 100


def test_a_program_sees_neither_the_environment_nor_what_another_has_left(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = "import os\nprint(sorted(os.environ), os.listdir())\nopen('left', 'w')"
    assert run_python(code) == run_python(code)
    assert "HF_TOKEN" not in run_python(code) and "['main.py']" in run_python(code)


CALL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\ntrainer = os.getppid()\n"


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in code_tool.MACHINES, reason="nothing is refused"
)
def test_a_program_can_neither_signal_nor_stop_nor_change_the_trainer():
    calls = {
        "signal 0": "libc.kill(trainer, 0)",
        "to all threads of it": "libc.tgkill(trainer, trainer, 0)",
        "seize, which stops nothing": "libc.ptrace(0x4206, trainer, 0, 0)",
        "its limits": "libc.prlimit(trainer, 3, None, None)",
        "its memory": "libc.process_vm_readv(trainer, None, 0, None, 0, 0)",
        "where it runs": "libc.sched_setaffinity(trainer, 0, None)",
        "its priority": "libc.setpriority(0, trainer, 0)",
        "by a file's owner": "libc.fcntl(1, 8, trainer)",
        "by a socket's owner": "libc.ioctl(1, 0x8901, ctypes.byref(ctypes.c_int(trainer)))",
    }
    by_number = {"x86_64": (200, 434, 129), "aarch64": (130, 434, 138)}[platform.machine()]
    names = zip(("to a thread", "its file descriptor", "a signal with a value"), by_number, strict=True)
    calls |= {name: f"libc.syscall({number}, trainer, 0, 0)" for name, number in names}
    asked = "\n".join(f"print({name!r}, {call}, ctypes.get_errno())" for name, call in calls.items())
    expected = [f"{name} -1 {errno.EPERM}" for name in calls]
    assert run_python(CALL + asked).splitlines() == expected


def test_a_program_signals_and_limits_itself_as_it_likes():
    code = """import os, resource, signal, asyncio
signal.signal(signal.SIGUSR1, lambda *_: print("heard"))
os.kill(os.getpid(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR1)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
asyncio.run(asyncio.sleep(0))
print("done", flush=True)
os.abort()
"""
    assert run_python(code).splitlines() == ["heard", "heard", "done", "[ended by SIGABRT]"]


@pytest.mark.skipif(
    sys.platform != "linux" or code_tool.landlock_version() < 1, reason="this kernel has no Landlock"
)
def test_a_program_reads_and_writes_its_own_folder_and_reads_python(tmp_path: Path):
    secret = tmp_path / "token"
    secret.write_text("secret")
    for attempt in (
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os\nos.remove({str(secret)!r})",
        f"import os\nos.listdir({str(tmp_path)!r})",
        "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')",
        "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())",
        f"import os\nos.truncate({str(secret)!r}, 0)",
    ):
        assert "PermissionError" in run_python(attempt).splitlines()[-1], attempt
    assert secret.read_text() == "secret" and not (tmp_path / "new").exists()
    code = """import json, os, sqlite3, tempfile
os.makedirs("a/b")
open("a/b/x", "w").write("kept")
os.rename("a/b/x", "a/y")
print(open("a/y").read(), file=open(os.devnull, "w"))
with tempfile.NamedTemporaryFile("w") as file:
    print(json.dumps(os.path.exists(file.name)), len(os.listdir("/proc/self")) > 1)
"""
    assert run_python(code) == "true True\n"
