"""The one command of a GPU hour: parts in their order, none in another's way."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import DONE, FAILED, LATE, PARTS, SKIPPED, Part

WRITES = "import sys; open(sys.argv[1], 'w').write('[1, 2]'); open(sys.argv[2], 'w').write('half [')"


def part(name: str, code: str, minutes: float = 1.0, **options) -> Part:
    command = (sys.executable, "-I", "-S", "-c", code, "{json}", "{log}")
    return Part(name, "a test", minutes, command, **options)


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())["parts"]


def test_a_failing_a_late_and_a_missing_part_leave_the_others_alone(tmp_path, capfd, monkeypatch):
    """And what runs late is told so, and may save."""
    monkeypatch.setattr(gpu, "SAVE_EVERY", 0.2)
    late = """
import signal, sys, time
def save(*_):
    open(sys.argv[1], "w").write('["saved"]')
    raise SystemExit(130)
signal.signal(signal.SIGTERM, save)
print("soon", flush=True)
time.sleep(60)
"""
    parts = [
        part("fails", "print('why it failed'); raise SystemExit(3)"),
        part("late", late, minutes=0.03),
        part("absent", "", needs=("no-such-tool",)),
        part("works-well", WRITES),
    ]

    code = gpu.run(parts, 5.0, tmp_path)

    found = results(tmp_path)
    assert {name: result["state"] for name, result in found.items()} == {
        "fails": FAILED, "late": LATE, "absent": SKIPPED, "works-well": DONE
    }  # fmt: skip
    assert (found["fails"]["exit_code"], found["absent"]["why"]) == (3, "no-such-tool not installed")
    assert found["late"]["result"] == ["saved"]
    assert (found["works-well"]["result"], found["works-well"]["result.log"]) == ([1, 2], "half [")
    log = (tmp_path / "log.txt").read_text()
    assert log.index("fails: a test") < log.index("why it failed") < log.index("soon")
    assert code == 1
    assert "works-well     done" in capfd.readouterr().out

    (tmp_path / "records").mkdir()
    assert gpu.main(["--out", str(tmp_path), "--unpack", str(tmp_path / "records")]) == 0
    (file,) = (tmp_path / "records").iterdir()
    assert (file.name, json.loads(file.read_text())) == ("gpu_works_well.json", [1, 2])


def test_what_broke_the_device_is_left_out_of_a_second_run_of_its_part(tmp_path):
    code = """
import json, sys
lost = {"culprit": "bad", "cells": []} if "--without" not in sys.argv else {"culprit": None, "cells": [1]}
json.dump(lost | {"arguments": sys.argv[3:]}, open(sys.argv[1], "w"))
raise SystemExit(lost["culprit"] is not None)
"""

    exit_code = gpu.run([part("peers", code), part("works", WRITES)], 5.0, tmp_path)

    found = results(tmp_path)["peers"]
    assert (exit_code, found["state"], found["broke the device"]) == (0, DONE, ["bad"])
    assert found["result"] == {"culprit": None, "cells": [1], "arguments": ["--without", "bad"]}
    assert found["before"]["state"] == FAILED
    assert results(tmp_path)["works"]["state"] == DONE


def test_results_can_be_read_while_a_part_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "SAVE_EVERY", 0.2)
    code = f"""
import json, sys, time
open(sys.argv[1], "w").write('["so far"]')
while True:
    time.sleep(0.1)
    try:
        found = json.load(open({str(tmp_path / "results.json")!r}))["parts"]["looking"]
    except OSError:
        continue
    if found == {{"state": "running", "result": ["so far"]}}:
        raise SystemExit(0)
"""

    assert gpu.run([part("looking", code)], 5.0, tmp_path) == 0


def test_a_second_run_adds_to_the_folder_and_keeps_what_it_has_no_time_for(tmp_path, capsys):
    first, second = part("first", WRITES), part("second", WRITES)
    gpu.run([first], 5.0, tmp_path)

    assert gpu.run([first, second], 0.0, tmp_path) == 0
    assert results(tmp_path)["first"]["state"] == DONE
    assert results(tmp_path)["second"] == {"state": SKIPPED, "why": "the time is spent"}
    go_on = f"go on with: python -m benchmarks.gpu --out {tmp_path} --only first second"
    assert go_on in capsys.readouterr().out
    gpu.run([second], 5.0, tmp_path)

    assert [result["state"] for result in results(tmp_path).values()] == [DONE, DONE]


@pytest.mark.parametrize(
    "chosen",
    [p for p in PARTS if p.command[1] == "-m" and p.command[2] != "pytest"],
    ids=lambda part: part.name,
)
def test_a_parts_command_line_is_one_that_its_program_takes(chosen, monkeypatch, tmp_path):
    values = {"{json}": str(tmp_path / "out.json"), "{log}": str(tmp_path / "log"), "{minutes}": "0.5"}
    _, _, module, *arguments = (values.get(word, word) for word in chosen.command)
    parsed = []

    def stop(self, *given):
        parsed.append(parse(self, *given))
        raise KeyError

    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    program = importlib.import_module(f"{module}.__main__" if module == "benchmarks" else module)
    with pytest.raises(KeyError):
        program.main(arguments)
    assert parsed and ("{minutes}" not in chosen.command or parsed[0].minutes == 0.5)


def test_what_decides_the_goals_comes_first_and_fits_in_eight_minutes(tmp_path, monkeypatch):
    names = [part.name for part in PARTS]
    first = names[: names.index("crossover") + 1]
    ran = []
    monkeypatch.setattr(gpu, "run", lambda parts, minutes, out: ran.extend(p.name for p in parts) or 0)

    gpu.main(["--out", str(tmp_path), "--only", "tune", "goals-2048", "profile", "--skip", "profile"])

    assert ran == ["goals-2048", "tune"]
    assert first == ["environment", "smoke", "goals-2048", "goals-4096", "goals-small", "crossover"]
    assert sum(part.minutes for part in PARTS if part.name in first) <= 8
    assert names[-1] == "tune" and len(set(names)) == len(names)
