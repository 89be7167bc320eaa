"""The one command of a GPU hour: parts in their order, none in another's way."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from grpo_fast.kernels import cuda

from benchmarks import gpu, kernels
from benchmarks.contest import Contest
from benchmarks.gpu import DONE, FAILED, LATE, PARTS, SKIPPED, Part
from benchmarks.problem import Setting
from benchmarks.rows import make_problem
from grpo_fast.head.plan import Device

CPU = torch.device("cpu")

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


HEAD = "--tokens 32 --hidden 16 --vocab 300 --impl ours --dtype float32"
STEP = "--model toy --prompts 1 --group 2"
TINY = {
    "head": f"{HEAD} --histogram benchmarks/results/live_tiles_qwen2.5_coder_1.5b.json",
    "kernels": HEAD.replace("--impl ours", ""),
    "train": f"{STEP} --prompt 4 --completion 4 --steps 1 --engine transformers --impl ours",
    "group": "--model toy --prompt 4 --completion 4 --largest 2 --impl ours",
    "step": f"{STEP} --micro-batch-tokens 300 --impl ours",
    "rollout": f"{STEP} --completion 4",
}
"""What a part's command is given besides, to be done on a CPU in seconds."""


@pytest.mark.parametrize("chosen", PARTS, ids=lambda part: part.name)
def test_every_part_starts_and_ends(chosen, monkeypatch, tmp_path):
    monkeypatch.chdir(gpu.ROOT)
    out = tmp_path / "out.json"
    values = {"{json}": str(out), "{log}": str(tmp_path / "log"), "{minutes}": "3"}
    words = [values.get(word, word) for word in chosen.command]
    if "pytest" in words or "setup.py" in words:
        assert all((gpu.ROOT / word).exists() for word in words if word.startswith(("tests", "setup")))
        return
    module, *arguments = words[2:]
    if module == "benchmarks":
        module, tiny = "benchmarks.__main__", TINY.get(arguments[0], "").split()
        arguments += [*tiny, "--device", "cpu", "--repeats", "1"]

    code = importlib.import_module(module).main(arguments)

    assert code == 0
    cells = json.loads(out.read_text()).get("cells", [])
    assert {cell["status"] for cell in cells} <= {"ok", "skipped"}
    assert any(cell["status"] == "ok" for cell in cells) == (module == "benchmarks.__main__")


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels in place of the torch path, on the CPU."""
    pytest.importorskip("triton")
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("a GPU is there: the benchmarks themselves run on it")
    hopper = Device("cuda", (9, 0), shared_memory=232_448, has_triton=True)
    monkeypatch.setattr(kernels, "device_facts", lambda kind, index: hopper)
    monkeypatch.setattr(cuda, "LIBRARY", Path("not built"))


def test_each_kernel_is_measured_and_its_work_counted(interpreted):
    tokens, hidden, vocabulary = 4, 16, 130
    setting = Setting("peaked", tokens, hidden, vocabulary, "forward_backward", True, "bfloat16")
    entrants = kernels.entrants_of([*kernels.ON_CUDA], lambda: [make_problem(setting, CPU, 0)])
    contest = Contest({}, entrants, CPU, memory=False)
    contest.measure(math.inf, 1)

    found = {one.implementation: one for one in contest.results()}
    assert {name for name, one in found.items() if one.status != "ok"} == {"histogram, CUDA C++"}  # not built
    entries = found[kernels.SPARSE].metrics["entries_per_row"] * tokens
    product = 2 * tokens * hidden * vocabulary
    for name, flops in (
        ("forward", product),
        ("dX and dW, dense", 3 * product),
        (kernels.SPARSE, 4 * entries * hidden),
    ):
        assert found[name].metrics["flops_per_second"] == pytest.approx(1e3 * flops / found[name].time.median)


def test_what_decides_the_goals_comes_first_and_fits_in_eight_minutes(tmp_path, monkeypatch):
    names = [part.name for part in PARTS]
    first = names[: names.index("peers")]
    ran = []
    monkeypatch.setattr(gpu, "run", lambda parts, minutes, out: ran.extend(p.name for p in parts) or 0)

    gpu.main(["--out", str(tmp_path), "--only", "rollout", "goals-2048", "profile", "--skip", "profile"])

    assert ran == ["goals-2048", "rollout"]
    assert first == ["environment", "smoke", "goals-2048", "goals-4096", "goals-small"]
    assert sum(part.minutes for part in PARTS if part.name in first) <= 8
    assert len(set(names)) == len(names)
