"""The doctor: what it finds here, and what it makes of machines that lack something."""

from __future__ import annotations

import importlib.metadata
import json
import sys

import pytest

from grpo_fast.cli import main
from grpo_fast.cli.doctor import examine


def test_a_working_installation_is_healthy_and_says_what_it_has(capsys):
    assert main(["doctor", "--json"]) == 0

    record = json.loads(capsys.readouterr().out)
    assert record["healthy"]
    assert {"torch", "triton", "vllm", "liger-kernel"} <= {finding["name"] for finding in record["libraries"]}
    assert any(finding["name"] == "cpu" and "threads" in finding["detail"] for finding in record["devices"])
    assert any(finding["name"] == "head" and "path" in finding["detail"] for finding in record["abilities"])


def test_a_foreign_package_named_kernels_is_found_out(tmp_path, monkeypatch, capsys):
    if any(d.metadata["Name"] == "kernels" for d in importlib.metadata.distributions()):
        pytest.skip("the hub's kernels package is installed")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)

    assert main(["doctor"]) == 1
    assert "remove its folder from sys.path" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("requirement", "state", "healthy", "remedy"),
    [
        ("no-such-library>=2", "missing", False, "pip install 'no-such-library>=2'"),
        ("no-such-library; extra == 'tasks'", "missing", True, "pip install 'grpo-fast[tasks]'"),
        ("torch>=999", "broken", False, "pip install --upgrade 'torch>=999'"),
        ("torch>=2.9", "ok", True, ""),
    ],
)
def test_only_essential_libraries_decide_on_health_and_all_say_how_to_get_them(
    requirement, state, healthy, remedy
):
    diagnosis = examine([requirement])

    library = diagnosis.sections["libraries"][1]
    assert (library.state, diagnosis.healthy, library.remedy) == (state, healthy, remedy)
    assert remedy in diagnosis.text()


def test_a_library_that_does_not_import_is_broken_and_what_only_developers_need_is_not_looked_for(
    monkeypatch,
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    _, library = examine(["datasets", "pytest; extra == 'test'"]).sections["libraries"]
    assert (library.name, library.state, library.essential) == ("datasets", "broken", True)
