"""The code tool answers the model, and what its code does ends with it."""

from __future__ import annotations

import sys
import time

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
