"""pytest plugin of `benchmarks.peer_suites`: deselects by name, and records every result as it comes.

`PEER_REPORT` is the file of results, JSON lines; `PEER_DESELECT` a JSON object {pattern: reason}.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    patterns = {re.compile(text): why for text, why in json.loads(os.environ["PEER_DESELECT"]).items()}
    kept, dropped = [], []
    for item in items:
        why = next((why for pattern, why in patterns.items() if pattern.search(item.nodeid)), None)
        if why is None:
            kept.append(item)
        else:
            dropped.append(item)
            _record(test=item.nodeid, outcome="deselected", message=why)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
    _record(selected=len(kept))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _record(test=report.nodeid, outcome="failed", message=report.longreprtext[-2000:])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        _record(test=report.nodeid, outcome=report.outcome, message=_message(report), seconds=report.duration)


def _message(report: pytest.TestReport) -> str:
    if report.skipped:
        return str(report.longrepr[-1]) if isinstance(report.longrepr, tuple) else ""
    return report.longreprtext[-2000:] if report.failed else ""


def _record(**values: Any) -> None:
    with open(os.environ["PEER_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
