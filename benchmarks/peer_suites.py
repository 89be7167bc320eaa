"""The peers' own tests, run against our functions: `python -m benchmarks.peer_suites --source DIR`.

DIR holds one folder for each suite, a checkout of that project: trl, liger, cce, verl, prime_rl; those that
are missing are left out. Tests are copied to a scratch folder, our functions take the peers' names there
(`benchmarks.peer_projects`), and pytest runs in a process of its own. Without a GPU the copies compute on the
CPU. Printed for each suite: passed, failed, deselected, skipped, and every failure's kind.

This module is pytest's plugin in that process: it deselects by name, and records every result as it comes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import environment
from benchmarks.peer_projects import SUITES, Suite
from benchmarks.record import write_json

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
UNKNOWN = "unexplained"
OUTCOMES = ("passed", "failed", "deselected", "skipped")
REPORT, DESELECT = "PEER_REPORT", "PEER_DESELECT"  # variables: a file of JSON lines, and {pattern: reason}


def prepare(name: str, source: Path, scratch: Path) -> None:
    """Copies a suite's files, adapted, to `scratch`.

    Raises:
        ValueError: the checkout does not have them.
    """
    suite = SUITES[name]
    for origin, target in suite.copied.items():
        if not (source / origin).exists():
            raise ValueError(f"{source} has no {origin}: give a checkout of {suite.url}")
        place = scratch / target
        place.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (source / origin).is_dir() else shutil.copy
        copy(source / origin, place)
    for target, text in suite.written.items():
        (scratch / target).write_text(text)
    for test in [*scratch.rglob("test_*.py"), *scratch.rglob("*_case.py")]:
        text = test.read_text()
        for old, new in () if torch.cuda.is_available() else suite.on_cpu:
            text = text.replace(old, new)
        test.write_text(f"from benchmarks.peer_projects import {name} as _alias\n\n_alias()\n{text}")


def run_suite(
    name: str, source: Path, seconds: float, extra: Sequence[str] = (), large: bool = False
) -> dict[str, Any]:
    """One suite's outcome.

    Args:
        seconds: after which pytest is stopped; results up to then count.
        large: also what takes long without a GPU.
        extra: arguments of pytest.
    """
    suite = SUITES[name]
    on_gpu = torch.cuda.is_available()
    left_out = suite.deselect | ({} if on_gpu else suite.gpu_only | ({} if large else suite.large))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        prepare(name, source, scratch)
        report = scratch / "results.jsonl"
        command = [sys.executable, "-m", "pytest", *suite.tests, "-p", "benchmarks.peer_suites", "-q"]
        command += ["-p", "no:cacheprovider", "--rootdir", folder, "-W", "ignore", "--tb=short", *extra]
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join([*(str(scratch / p) for p in suite.import_path), str(ROOT)]),
            REPORT: str(report),
            DESELECT: json.dumps(left_out),
            "TORCHDYNAMO_DISABLE": "0" if on_gpu else "1",
        }
        finished, output = True, ""
        try:
            done = subprocess.run(
                command, cwd=scratch, env=environ, capture_output=True, text=True, timeout=seconds
            )
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            finished = False
        lines = report.read_text().splitlines() if report.exists() else []
    return {
        "commit": _commit(source),
        "installed": _version(suite.distribution),
        "finished": finished,
        **outcome(suite, [json.loads(line) for line in lines]),
        **({} if lines else {"output": output[-3000:]}),
    }


def outcome(suite: Suite, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, reasons for what was deselected, and each failure with its kind."""
    tests = [result for result in results if "test" in result]
    counts = Counter(test["outcome"] for test in tests)
    return {
        **{name: counts[name] for name in OUTCOMES},
        "selected": sum(result.get("selected", 0) for result in results),
        "reasons": {
            name: dict(Counter(test["message"] for test in tests if test["outcome"] == name))
            for name in ("deselected", "skipped")
        },
        "failures": [
            {"test": test["test"], "kind": _kind(suite, test), "message": _errors(test["message"])}
            for test in tests
            if test["outcome"] == "failed"
        ],
    }


def _kind(suite: Suite, test: dict[str, Any]) -> str:
    """What is known of such a failure."""
    text = f"{test['test']}\n{test['message']}"
    return next((kind for pattern, kind in suite.failures.items() if re.search(pattern, text)), UNKNOWN)


def _errors(message: str) -> str:
    lines = message.splitlines()
    errors = [line[2:].strip() for line in lines if line.startswith("E ") and "File" not in line]
    return " ".join(errors)[:300] or message[-300:]


def _commit(source: Path) -> str | None:
    """Of a git checkout, or as a file COMMIT beside an unpacked archive says."""
    if (source / "COMMIT").is_file():
        return (source / "COMMIT").read_text().strip()
    if not (source / ".git").exists():
        return None
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# The plugin -----------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = json.loads(os.environ[DESELECT])
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        why = next((why for pattern, why in reasons.items() if re.search(pattern, item.nodeid)), None)
        (kept if why is None else dropped).append(item)
        if why is not None:
            _record(test=item.nodeid, outcome="deselected", message=why)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
    _record(selected=len(kept))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _record(test=report.nodeid, outcome="failed", message=report.longreprtext[-2000:])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        message = report.longreprtext[-2000:] if report.failed else ""
        if report.skipped and isinstance(report.longrepr, tuple):
            message = str(report.longrepr[-1])
        _record(test=report.nodeid, outcome=report.outcome, message=message, seconds=report.duration)


def _record(**values: Any) -> None:
    with open(os.environ[REPORT], "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


# The command ----------------------------------------------------------------------------------------------


def table(outcomes: dict[str, dict[str, Any]]) -> Table:
    shown = Table("suite", "commit", *OUTCOMES, "not reached")
    for name, found in outcomes.items():
        reached = found["passed"] + found["failed"] + found["skipped"]
        counts = [*(found[outcome] for outcome in OUTCOMES), max(0, found["selected"] - reached)]
        shown.add_row(name, (found["commit"] or "-")[:10], *map(str, counts))
    return shown


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, metavar="DIR")
    parser.add_argument("--suite", nargs="+", choices=tuple(SUITES), default=tuple(SUITES))
    parser.add_argument("--minutes", type=float, default=60, help="for one suite")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each suite; others are kept")
    parser.add_argument("--large", action="store_true", help="without a GPU, too, every shape")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args(given)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    outcomes: dict[str, dict[str, Any]] = {}
    for name in options.suite:
        source = options.source / name
        if not source.is_dir():
            console.print(f"{name}: no folder {source}; a checkout of {SUITES[name].url}")
            continue
        found = run_suite(name, source, 60 * options.minutes, options.pytest, options.large)
        outcomes[name] = found
        for what, reasons in found["reasons"].items():
            for reason, count in reasons.items():
                console.print(f"{name}: {count} {what}: {reason}")
        for failure in found["failures"]:
            console.print(f"{name}: failed {failure['test']}: {failure['kind']}: {failure['message']}")
        if "output" in found:
            console.print(f"{name}: pytest did not start:\n{found['output']}")
        if options.json:
            _save(options.json, outcomes)
    console.print(table(outcomes))
    unexplained = [f for found in outcomes.values() for f in found["failures"] if f["kind"] == UNKNOWN]
    return 1 if unexplained or not outcomes else 0


def _save(path: Path, outcomes: dict[str, dict[str, Any]]) -> None:
    kept = json.loads(path.read_text()).get("suites", {}) if path.exists() else {}
    about = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    about.pop("command", None)  # full of local paths
    write_json(path, {"environment": about, "suites": kept | outcomes})


if __name__ == "__main__":
    sys.exit(main())
