"""The one command of a GPU hour: parts in their order, none in another's way."""

from __future__ import annotations

import json
import shlex

import pytest

from benchmarks import gpu
from benchmarks.__main__ import main
from benchmarks.gpu import DONE, FAILED, LATE, PARTS, SKIPPED, Part


def test_a_failing_a_late_and_a_missing_part_leave_the_others_alone(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(gpu, "TO_END", 0.0)
    parts = [
        Part("fails", 1, "python -c \"print('why'); raise SystemExit(3)\""),
        Part("late", 0.05, "python -c 'import time; time.sleep(600)'"),
        Part("absent", 1, "python", "no-such-tool torch<2"),
        Part("tests", 1, "python -c \"print('tests/a.py::test_b[x y] FAILED [ 5%]'); raise SystemExit(1)\""),
        Part("works", 1, "python -c pass"),
    ]

    code = gpu.run(parts, 5.0, tmp_path)

    found = json.loads((tmp_path / "summary.json").read_text())
    assert {name: one["state"] for name, one in found.items()} == {
        "fails": FAILED, "late": LATE, "absent": SKIPPED, "tests": FAILED, "works": DONE
    }  # fmt: skip
    assert (found["fails"]["exit_code"], found["absent"]["why"]) == (3, "no-such-tool, torch<2 not installed")
    assert found["tests"]["failures"] == ["tests/a.py::test_b[x y]"]
    assert (tmp_path / "fails.log").read_text() == "why\n"
    assert code == 1 and "works          done" in capfd.readouterr().out

    again = [Part("fails", 1, "python -c pass"), Part("works", 1, "python -c 'raise SystemExit(1)'")]
    assert gpu.run(again, 5.0, tmp_path) == 0 and "works          done before" in capfd.readouterr().out
    assert gpu.run(again, 5.0, tmp_path, again=True) == 1


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_command_of_every_part_is_one_that_exists(part, monkeypatch, capsys):
    words = shlex.split(part.command)
    files = [word for word in words if word.startswith(("tests/", "setup"))]

    assert all((gpu.ROOT / word).exists() for word in files)
    if words[0] not in ("python", "compute-sanitizer"):
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
        given = [*words, "--device=cpu", "--minutes=1", "--collect-only", "-p", "no:faulthandler"]
        assert main(given) == 0 and "::test_" in capsys.readouterr().out
