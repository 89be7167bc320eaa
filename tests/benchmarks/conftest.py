"""The benchmarks on a CPU at tiny sizes: pytest within pytest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main

Rows = dict[str, dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rows]:
    """Run benchmarks; return rows by implementation, of several settings by the ids of their parameters."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # else nothing is timed
    monkeypatch.setattr("pytest_benchmark.plugin.get_cpu_info", dict)

    def run(*arguments: str, codes: tuple[int, ...] = (0,)) -> Rows:
        out = tmp_path / "record.json"
        bounds = ("--benchmark-max-time=0.01", "--benchmark-min-rounds=3", f"--benchmark-json={out}")
        inner = ("-s", "-p", "no:faulthandler", "--device=cpu", *bounds)
        assert main([*arguments, *inner]) in codes
        if not out.exists():  # nothing was timed
            return {}
        record = json.loads(out.read_text())
        rows = [*record["benchmarks"], *record["not_measured"]]
        found = {row["params"]["peer"]: row for row in rows}
        return found if len(found) == len(rows) else {row["fullname"].partition("[")[2]: row for row in rows}

    return run
