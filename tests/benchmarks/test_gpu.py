"""The one command of a GPU hour: parts in their order, none in another's way."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import DONE, FAILED, LATE, PARTS, SKIPPED, Part


def part(name: str, code: str, minutes: float = 1.0, **options) -> Part:
    return Part(name, "a test", minutes, (sys.executable, "-c", code, "{json}", "{log}"), **options)


WRITES = "import sys; open(sys.argv[1], 'w').write('[1, 2]'); open(sys.argv[2], 'w').write('half [')"


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())["parts"]


def test_a_failing_a_late_and_a_missing_part_leave_the_others_alone(tmp_path, capfd):
    slow = "import sys, time; open(sys.argv[1], 'w').write('[3]'); print('soon', flush=True); time.sleep(60)"
    parts = [
        part("fails", "print('why it failed'); raise SystemExit(3)"),
        part("late", slow, minutes=0.03),
        part("absent", "", missing=lambda: "no such tool"),
        part("works", WRITES),
    ]

    code = gpu.run(parts, 5.0, tmp_path)

    found = results(tmp_path)
    assert {name: result["state"] for name, result in found.items()} == {
        "fails": FAILED, "late": LATE, "absent": SKIPPED, "works": DONE
    }  # fmt: skip
    assert (found["fails"]["exit_code"], found["absent"]["why"]) == (3, "no such tool")
    assert found["late"]["result"] == [3]
    assert (found["works"]["result"], found["works"]["result.log"]) == ([1, 2], "half [")
    log = (tmp_path / "log.txt").read_text()
    assert "why it failed" in log and "soon" in log
    assert code == 1
    assert "works          done" in capfd.readouterr().out


def test_parts_that_no_time_is_left_for_are_named_and_not_started(tmp_path):
    code = gpu.run([part("works", WRITES)], 0.0, tmp_path)

    assert results(tmp_path) == {"works": {"state": SKIPPED, "why": "the time is spent"}}
    assert code == 0


def test_only_and_skip_choose_parts_in_their_order(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(gpu, "run", lambda parts, minutes, out: ran.extend(p.name for p in parts) or 0)

    gpu.main(["--out", str(tmp_path), "--only", "tune", "goals-2048", "profile", "--skip", "profile"])

    assert ran == ["goals-2048", "tune"]


def test_what_decides_the_goals_fits_in_eight_minutes():
    names = [part.name for part in PARTS]
    first = names[: names.index("library") + 1]

    assert len(set(names)) == len(names)
    assert {"environment", "goals-2048", "goals-4096", "goals-small", "profile"} <= set(first)
    assert sum(part.minutes for part in PARTS if part.name in first) <= 8


@pytest.mark.parametrize("name", [part.name for part in PARTS if "--minutes" in part.command])
def test_a_part_with_a_budget_of_its_own_is_told_it(name):
    command = next(part.command for part in PARTS if part.name == name)

    assert command[command.index("--minutes") + 1] == "{minutes}"
