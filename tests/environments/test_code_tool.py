"""The code tool answers the model, and what its code does ends with it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

try:
    from grpo_fast.examples import code_tool
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

run_python = code_tool.run_python


def test_the_model_sees_what_its_program_prints_and_the_text_of_its_error():
    assert run_python("print(6 * 7)") == "42\n"
    assert run_python("x = 6") == "[nothing was printed]"
    error = run_python("print('before', flush=True)\n1 / 0")
    assert error.startswith("before\nTraceback") and error.endswith("ZeroDivisionError: division by zero\n")
    assert "UnicodeEncodeError" not in run_python("print('\ud800')")


def test_an_endless_loop_is_stopped_with_its_children(monkeypatch):
    monkeypatch.setattr(code_tool, "SECONDS", 1)
    monkeypatch.setattr(code_tool, "SANDBOX", code_tool.find_sandbox())
    code = "import os\nprint('on', flush=True)\nos.fork()\nwhile True: pass"
    # On a busy machine the program is stopped before it prints.
    assert run_python(code).removeprefix("on\n") == "[stopped after 1 seconds]"


def test_a_program_has_no_network_no_secrets_and_no_file_of_another(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    secret = tmp_path / "token"
    secret.write_text("secret")
    code = "import os\nprint(sorted(os.environ), os.listdir())\nopen('left', 'w')"
    assert run_python(code) == run_python(code)
    assert "HF_TOKEN" not in run_python(code)
    for attempt in (
        f"open({str(secret)!r})",
        "open('/usr/new', 'w')",
        "import os\nos.chmod('/usr/bin/env', 0o777)",
        "import socket\nsocket.create_connection(('1.1.1.1', 80), 1)",
        f"import os\nos.kill({os.getpid()}, 9)",
        f"open('/proc/{os.getpid()}/environ')",
    ):
        assert "Error" in run_python(attempt).splitlines()[-1], attempt
    assert "MemoryError" in run_python("held = bytearray(2**31)")


def test_without_a_sandbox_the_tool_names_what_to_install(monkeypatch: Any):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ImportError, match="install bubblewrap, or docker or podman"):
        code_tool.find_sandbox()
