"""`python -m benchmarks`, `grpo-fast bench` and `python -m benchmarks.gpu`: options, tables, parts."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks import gpu
from benchmarks.__main__ import main
from benchmarks.gpu import DONE, FAILED, LATE, SKIPPED, Part
from benchmarks.pages import filled
from benchmarks.tables import DASH, TIMES, table

SOURCES = Path(benchmarks.__file__).parent


def test_without_a_benchmark_the_command_lists_them(capsys):
    assert (main([]), main(["--help"]), main(["head", "no-such"])) == (2, 0, 2)

    captured = capsys.readouterr()
    assert all(f"\n  {path.stem[5:]}" in captured.out for path in SOURCES.glob("test_*.py"))
    assert "no benchmark 'no-such': there are bias" in captured.err


def test_without_pytest_benchmark_the_command_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytest_benchmark", None)
    assert main(["head"]) == 2 and "pip install 'grpo-fast[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message", "codes"),
    [
        ("head --minutes -1", "--minutes -1.0: must be at least 0", (4,)),
        ("head --peer nobody", "--peer nobody: in no name of 'ours'", (2,)),
        ("head --shape 16x4", "--shape 16x4: must be NxHxV", (4,)),
        ("head --rows odd", "--rows odd: must be one of histogram, peaked, flat, real", (2,)),
        ("step --shape 1x1x1", "--shape: the chosen benchmarks have no such option", (4,)),
        ("step --model gpt", "--model gpt: must be one of", (2,)),
        ("train --sizes groups=3", "--sizes groups=3: must be NAME=NUMBER above 0, of layers, prompts", (2,)),
        ("train --sizes group=2.5", "--sizes group=2.5: must be NAME=NUMBER above 0", (2,)),
        ("train --sizes group=1", "--sizes group=1: must be at least 2", (1,)),
        ("group --sizes memory=1.0 --minutes 0 --peer ours", "no time left", (0,)),
        ("head --rows real --shape 8x576x9 --peer torch", "take --shape 8x576x49152", (1,)),
        ("head --benchmark-disable --peer tolerance --shape 9x8x99 --rows flat", "1 passed, 1 skipped", (0,)),
        ("bias", "this needs a GPU", (0,)),
    ],
)
def test_a_value_that_cannot_be_used_is_named(run, arguments, message, codes, capsys):
    assert run(*arguments.split(), codes=codes) == {}

    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def row(peer: str, *seconds: float, turn: int = 0, **info: object) -> dict[str, object]:
    params = {"shape": "64x8x100" if peer != "greedy" else "128x8x100", "weight": "frozen", "turn": turn}
    stats = {"stats": {"data": [*seconds]}} if seconds else {}
    return {"params": params | {"peer": peer}, "extra_info": info, **stats}


VENDOR = {"reference": "X Wᵀ", "quartiles": [1.0, 2.0]}
ROWS = [
    row("slow", 0.005, ratio=3.0, tokens=30, phases={"a": 0.001}, **VENDOR),
    row("fast", 0.004, ratio=1.5, peak_bytes=3 << 20, **VENDOR),
    row("slow", 0.001, turn=1),
    row("absent", remark="not installed"),
    row("greedy", accuracy={"logprob": float("nan")}, remark="out of memory"),
]


def test_a_table_is_sorted_by_ratio_with_turns_in_one_line():
    title, (heads, *lines) = table(ROWS)

    found = [dict(zip(heads, line, strict=True)) for line in lines]
    assert title == "weight frozen" and "dX" not in heads and table([]) == ("", [])
    assert [one["implementation"] for one in found] == ["fast", "slow", "- a", "absent", "greedy"]
    fast, slow, phase, _, greedy = found
    assert (fast[f"{TIMES} X Wᵀ"], fast["MiB"], fast["shape"]) == ("1.50 [1.00, 2.00]", "3", "64x8x100")
    assert (slow["ms"], slow["tokens/s"], phase["ms"]) == ("3.00", "10,000", "1.00")
    assert (greedy["remark"], greedy["ms"], greedy["|Δlogp|"]) == ("out of memory", DASH, "nan")
    assert [line[0] for line in table(ROWS, brief=True)[1]] == ["implementation", "fast", "slow"]


@pytest.mark.parametrize(
    ("text", "record", "named"),
    [
        ("<!-- table: other -->\n<!-- end -->\n", "{}", "other.json cannot be read"),
        ("<!-- table: run -->\n", "{}", "has no `<!-- end -->`"),
        ("<!-- table: run -->\n<!-- end -->\n", '{"schema": 2}', "run.json cannot be read as a record"),
    ],
)
def test_a_marker_or_a_record_that_cannot_be_read_is_named(tmp_path, text, record, named):
    page = tmp_path / "README.md"
    page.write_text(text)
    (tmp_path / "run.json").write_text(record)

    with pytest.raises(ValueError, match=named):
        filled(page, tmp_path)


def test_a_table_by_hand_is_replaced(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table: step_cpu -->\nby hand\n<!-- end -->\nafter\n")

    found = filled(page, SOURCES / "results")
    assert found.startswith("before\n<!-- table: step_cpu -->\n| implementation |") and "by hand" not in found
    assert found.endswith("\n<!-- end -->\nafter\n")


def test_a_failing_a_late_and_a_missing_part_leave_the_others_alone(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(gpu, "TO_END", 0.0)
    parts = [
        Part("fails", 1, "python -c \"print('tests/a.py::test_b[x y] FAILED [ 5%]'); raise SystemExit(3)\""),
        Part("late", 0.05, "python -c 'import time; time.sleep(600)'"),
        Part("absent", 1, "python", "no-such-tool torch<2"),
        Part("works", 1, "python -c pass"),
    ]

    code = gpu.run(parts, 5.0, tmp_path)

    found = json.loads((tmp_path / "summary.json").read_text())
    states = {"fails": FAILED, "late": LATE, "absent": SKIPPED, "works": DONE}
    assert {name: one["state"] for name, one in found.items()} == states
    assert (found["fails"]["exit_code"], found["absent"]["why"]) == (3, "no-such-tool, torch<2 not installed")
    assert found["fails"]["failures"] == ["tests/a.py::test_b[x y]"]
    assert code == 1 and "works          done" in capfd.readouterr().out

    again = [Part("fails", 1, "python -c pass"), Part("works", 1, "python -c 'raise SystemExit(1)'")]
    assert gpu.run(again, 5.0, tmp_path) == 0 and "works          done before" in capfd.readouterr().out
    assert gpu.run(again, 5.0, tmp_path, again=True) == 1


@pytest.mark.parametrize("part", gpu.PARTS, ids=lambda part: part.name)
def test_the_command_of_every_part_is_one_that_exists(part, monkeypatch, capsys):
    words = shlex.split(part.command)
    files = [word for word in words if word.startswith(("tests/", "setup"))]

    assert all((gpu.ROOT / word).exists() for word in files)
    if words[0] not in ("python", "compute-sanitizer"):
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
        given = [*words, "--device=cpu", "--minutes=1", "--collect-only", "-p", "no:faulthandler"]
        assert main(given) == 0 and "::test_" in capsys.readouterr().out
