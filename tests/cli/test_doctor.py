"""The doctor: what it finds here, and what it makes of machines that lack something."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from grpo_fast.cli import doctor
from grpo_fast.cli.doctor import Diagnosis, Finding, examine


def run(*arguments: str, **settings) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "grpo_fast", "doctor", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **settings.pop("env", {})}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=env, check=False, **settings
    )


def test_a_working_installation_is_healthy_and_says_what_it_has():
    done = run("--json")

    record = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert record["healthy"]
    assert {"torch", "triton", "vllm", "flash-attn"} <= {finding["name"] for finding in record["libraries"]}
    assert any(finding["name"] == "cpu" and "threads" in finding["detail"] for finding in record["devices"])
    assert any(finding["name"] == "head" and "path" in finding["detail"] for finding in record["abilities"])


def test_a_foreign_package_named_kernels_is_found_out(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    if any(d.metadata["Name"] == "kernels" for d in importlib.metadata.distributions()):
        pytest.skip("the hub's kernels package is installed")

    done = run(env={"PYTHONPATH": str(tmp_path)})

    assert done.returncode == 1
    assert "remove its folder from sys.path" in done.stdout


def test_a_missing_essential_library_is_unhealthy_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(doctor, "LIBRARIES", (("no-such-library", "everything", True),))

    diagnosis = examine()

    assert not diagnosis.healthy
    assert "no-such-library: pip install no-such-library" in diagnosis.text()


def test_a_missing_optional_library_is_healthy_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(doctor, "LIBRARIES", (("no-such-library", "speed", False),))

    diagnosis = examine()

    assert diagnosis.healthy
    assert "no-such-library: pip install no-such-library" in diagnosis.text()


def test_a_library_that_is_too_old_is_broken(monkeypatch):
    monkeypatch.setattr(doctor, "MINIMUM", {"torch": (999,)})
    found = {finding.name: finding for finding in examine().libraries}
    assert found["torch"].state == "broken"
    assert found["torch"].remedy == "pip install --upgrade 'torch>=999'"


def test_a_library_that_does_not_import_is_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    found = {finding.name: finding for finding in examine().libraries}
    assert found["datasets"].state == "broken"
    assert "does not import" in found["datasets"].detail


def test_only_what_is_essential_decides_on_health():
    fine = (Finding("a", "ok", ""),)
    optional = (Finding("b", "broken", "", essential=False, remedy="fix b"),)
    essential = (Finding("c", "broken", "", essential=True),)

    assert Diagnosis(fine, fine, optional, fine).healthy
    assert not Diagnosis(fine, fine, fine, essential).healthy
