"""The doctor: what it finds here, and what it makes of machines that lack something."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from grpo_fast.cli import main
from grpo_fast.cli.doctor import examine


def test_a_working_installation_is_healthy_and_says_what_it_has(capsys):
    assert main(["doctor"]) == 0
    assert "everything that training needs is installed" in capsys.readouterr().out
    assert {"torch", "triton", "vllm", "liger-kernel", "cpu", "head"} <= {found.name for found in examine()}


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
    ("requirement", "state", "code", "remedy"),
    [
        ("no-such-library>=2", "missing", 1, "'no-such-library>=2'"),
        ("no-such-library; extra == 'reasoning-gym'", "missing", 0, "'grpo-fast[reasoning-gym]'"),
        ("torch>=999", "broken", 1, "'torch>=999'"),
        ("torch>=2.9", "ok", 0, ""),
        ("datasets; extra == 'train'", "broken", 1, "'grpo-fast[train]'"),
    ],
)
def test_only_essential_libraries_decide_on_health(requirement, state, code, remedy, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)  # does not import
    own = [requirement, "pytest; extra == 'test'"]  # developers' libraries are not looked for
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: own)

    remedy = f"pip install --upgrade {remedy}" if remedy else ""
    library = next(iter(examine()))
    assert library.state == state and remedy in library.detail
    assert main(["doctor"]) == code and remedy in capsys.readouterr().out
