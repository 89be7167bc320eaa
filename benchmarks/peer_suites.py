"""The peers' own tests, run against our functions: `python -m benchmarks.peer_suites --source DIR`.

DIR holds one folder for each suite, a checkout of that project: trl, liger, cce, verl, prime_rl; those that
are missing are left out. Tests are copied to a scratch folder, our functions take the peers' names there
(`benchmarks.peer_aliases`), and pytest runs in a process of its own. Without a GPU the copies compute on the
CPU. Printed for each suite: passed, failed, deselected, skipped, and every failure's kind.

This module is pytest's plugin in that process: it leaves tests out by name.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import torch
import yaml
from pydantic import TypeAdapter

from benchmarks.machine import environment
from benchmarks.record import write_json

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
Reasons = dict[str, str]  # by a pattern of a test's name
UNKNOWN = "unexplained"
OUTCOMES = ("passed", "failed", "deselected", "skipped")
REASONS, LEFT_OUT = "PEER_SUITES_LEFT_OUT", "left out: "  # a variable, JSON; how its reasons begin


@dataclass(frozen=True)
class Suite:
    """A project's tests of what we replace."""

    url: str
    copied: list[str]  # from the checkout into the scratch folder
    tests: list[str]  # pytest's arguments, in the scratch folder
    written: dict[str, str] = field(default_factory=dict)  # files of the scratch folder, and their text
    import_path: list[str] = field(default_factory=lambda: ["."])  # in the scratch folder
    on_cpu: dict[str, str] = field(default_factory=dict)  # replaced in the tests where there is no GPU
    left_out: Reasons = field(default_factory=dict)
    left_out_on_cpu: Reasons = field(default_factory=dict)
    large: Reasons = field(default_factory=dict)  # left out on a CPU unless asked for
    failures: dict[str, str] = field(default_factory=dict)  # pattern of name and message: kind


SUITES = TypeAdapter(dict[str, Suite]).validate_python(
    yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
)


def prepare(name: str, source: Path, scratch: Path) -> None:
    """Copies a suite's files, adapted, to `scratch`.

    Raises:
        ValueError: the checkout does not have them.
    """
    suite = SUITES[name]
    for part in suite.copied:
        if not (source / part).exists():
            raise ValueError(f"{source} has no {part}: give a checkout of {suite.url}")
        (scratch / part).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (source / part).is_dir() else shutil.copy
        copy(source / part, scratch / part)
    for part, text in suite.written.items():
        (scratch / part).write_text(text)
    for test in scratch.rglob("test_*.py"):
        text = test.read_text()
        for old, new in suite.on_cpu.items() if not torch.cuda.is_available() else ():
            text = text.replace(old, new)
        test.write_text(f"from benchmarks.peer_aliases import {name} as _alias\n\n_alias()\n{text}")


def run_suite(name: str, source: Path, large: bool) -> dict[str, Any]:
    """One suite's outcome; `large` includes what takes long without a GPU."""
    suite = SUITES[name]
    on_gpu = torch.cuda.is_available()
    left_out = suite.left_out | ({} if on_gpu else suite.left_out_on_cpu | ({} if large else suite.large))
    with tempfile.TemporaryDirectory() as folder:
        scratch, report = Path(folder), Path(folder, "results.xml")
        prepare(name, source, scratch)
        command = [sys.executable, "-m", "pytest", *suite.tests, "-p", "benchmarks.peer_suites", "-q"]
        command += ["-p", "no:cacheprovider", "--rootdir", folder, "-W", "ignore", "--tb=short"]
        command += [f"--junitxml={report}"]
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join([*(str(scratch / path) for path in suite.import_path), str(ROOT)]),
            REASONS: json.dumps(left_out),
            "TORCHDYNAMO_DISABLE": "0" if on_gpu else "1",
        }
        done = subprocess.run(command, cwd=scratch, env=environ, capture_output=True, text=True)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        tests = [(f"{case.get('classname')}::{case.get('name')}", *_outcome(case)) for case in cases]
    counts = Counter(outcome for _, outcome, _ in tests)
    return {
        "commit": _commit(source),
        **{outcome: counts[outcome] for outcome in OUTCOMES},
        "reasons": {
            outcome: dict(Counter(message for _, found, message in tests if found == outcome))
            for outcome in ("deselected", "skipped")
        },
        "failures": [_failure(suite, test, message) for test, found, message in tests if found == "failed"],
        **({} if tests else {"output": (done.stdout + done.stderr)[-3000:]}),
    }


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    """One of `OUTCOMES` of a test in pytest's report, and the reason or the error."""
    for failure in (*case.iter("failure"), *case.iter("error")):
        return "failed", (failure.text or "")[-2000:]
    for skipped in case.iter("skipped"):
        reason = skipped.get("message", "")
        is_ours = reason.startswith(LEFT_OUT)
        return ("deselected", reason.removeprefix(LEFT_OUT)) if is_ours else ("skipped", reason)
    return "passed", ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the process that runs a suite: skips what is left out, with the reason."""
    import pytest

    reasons = json.loads(os.environ[REASONS])
    for item in items:
        why = next((why for pattern, why in reasons.items() if re.search(pattern, item.nodeid)), None)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=LEFT_OUT + why))


def _failure(suite: Suite, test: str, message: str) -> dict[str, str]:
    """With what is known of such failures."""
    text = f"{test}\n{message}"
    kind = next((kind for pattern, kind in suite.failures.items() if re.search(pattern, text)), UNKNOWN)
    errors = [line[2:].strip() for line in message.splitlines() if line.startswith("E ")]
    return {"test": test, "kind": kind, "message": " ".join(errors)[:300] or message[-300:]}


def _commit(source: Path) -> str | None:
    """Of a git checkout, or as a file COMMIT beside an unpacked archive says."""
    if (source / "COMMIT").is_file():
        return (source / "COMMIT").read_text().strip()
    if not (source / ".git").exists():
        return None
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, metavar="DIR")
    parser.add_argument("--suite", nargs="+", choices=tuple(SUITES), default=tuple(SUITES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each suite; others are kept")
    parser.add_argument("--large", action="store_true", help="without a GPU, too, every shape")
    options = parser.parse_args(given)
    outcomes: dict[str, dict[str, Any]] = {}
    for name in options.suite:
        source = options.source / name
        if not source.is_dir():
            print(f"{name}: no folder {source}; a checkout of {SUITES[name].url}")
            continue
        found = run_suite(name, source, options.large)
        outcomes[name] = found
        print(f"{name}:", ", ".join(f"{found[outcome]:,} {outcome}" for outcome in OUTCOMES))
        for failure in found["failures"]:
            print(f"  failed {failure['test']}: {failure['kind']}: {failure['message']}")
        if "output" in found:
            print(f"  pytest did not start:\n{found['output']}")
        if options.json:
            kept = json.loads(options.json.read_text())["suites"] if options.json.exists() else {}
            about = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            write_json(options.json, {"environment": about, "suites": kept | outcomes})
    unexplained = [f for found in outcomes.values() for f in found["failures"] if f["kind"] == UNKNOWN]
    return 1 if unexplained or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
