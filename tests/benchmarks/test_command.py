"""`python -m benchmarks` and `grpo-fast bench`: their words, values that cannot be used, and the table."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks
from benchmarks.__main__ import REMOVED, main
from benchmarks.tables import DASH, TIMES, filled, table
from grpo_fast import cli

SOURCES = Path(benchmarks.__file__).parent


def test_without_a_benchmark_the_command_lists_them(capsys):
    assert (main([]), main(["--help"]), main(["no-such"]), main(["quickstart"])) == (2, 0, 2, 2)

    captured = capsys.readouterr()
    assert all(f"\n  {path.stem[5:]}" in captured.out for path in SOURCES.glob("test_*.py"))
    assert (
        "no benchmark 'no-such': there are accuracy" in captured.err and REMOVED["quickstart"] in captured.err
    )


def test_no_module_needs_the_name_it_has_in_a_checkout():
    """Installed they are `grpo_fast.benchmarks`: `benchmarks` is too common a name."""
    absolute = re.compile(r"^\s*(?:from|import) benchmarks\b", re.MULTILINE)

    assert [file.name for file in SOURCES.rglob("*.py") if absolute.search(file.read_text())] == []


def test_grpo_fast_bench_hands_its_arguments_over(monkeypatch):
    handed = {}

    def found(arguments: list[str], *, program: str) -> int:
        handed.update(arguments=arguments, program=program)
        return 7

    monkeypatch.setitem(sys.modules, "grpo_fast.benchmarks.__main__", SimpleNamespace(main=found))

    assert cli.main(["bench", "head", "--minutes", "1"]) == 7
    assert handed == {"arguments": ["head", "--minutes", "1"], "program": "grpo-fast bench"}


@pytest.mark.parametrize(("absent", "remedy"), [("benchmarks", "python -m benchmarks"), ("bench", "[bench]")])
def test_an_installation_that_lacks_something_says_what_to_do(absent, remedy, monkeypatch, capsys):
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "grpo_fast.benchmarks":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    if absent == "benchmarks":
        for name in ("grpo_fast.benchmarks", "grpo_fast.benchmarks.__main__"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
        assert cli.main(["bench", "head"]) == 1
    else:
        monkeypatch.setitem(sys.modules, "pytest_benchmark", None)
        assert main(["head"]) == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message", "codes"),
    [
        ("head --minutes -1", "--minutes -1.0: must be at least 0", (4,)),
        ("head --peer nobody", "--peer nobody: in no name of 'ours'", (2,)),
        ("head --shape 16x4", "--shape 16x4: must be NxHxV", (2,)),
        ("head --rows odd", "--rows odd: must be one of histogram, peaked, flat", (2,)),
        ("step --shape 1x1x1", "--shape: the chosen benchmarks have no such option", (4,)),
        ("step --model gpt", "--model gpt: must be one of", (2,)),
        ("train --sizes groups=3", "--sizes groups=3: must be NAME=NUMBER above 0, of layers, prompts", (2,)),
        ("train --sizes group=1", "--sizes group=1: must be at least 2", (1,)),
        ("head --minutes 0 --peer ours", "no time left", (0,)),
        ("bias", "this needs a GPU", (0,)),
    ],
)
def test_a_value_that_cannot_be_used_is_named(run, arguments, message, codes, capsys):
    assert run(*arguments.split(), codes=codes) == {}

    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def row(peer: str, seconds: list[float] | None = None, **info: object) -> dict[str, object]:
    stats = {"stats": {"data": seconds}} if seconds else {}
    params = {"shape": "64x8x100" if peer != "greedy" else "128x8x100", "weight": "frozen", "peer": peer}
    return {"params": params, "extra_info": info, **stats}


ROWS = [
    row(
        "slow",
        [0.004, 0.002],
        ratio=3.0,
        reference="X Wᵀ",
        quartiles=[2.0, 4.0],
        tokens=30,
        phases={"a": 0.001},
    ),
    row("fast", [0.004], ratio=1.5, reference="X Wᵀ", quartiles=[1.0, 2.0], peak_bytes=3 << 20),
    row("absent", remark="not installed"),
    row("greedy", accuracy={"logprob": float("nan")}, remark="out of memory"),
]


def test_a_table_goes_by_the_ratio_and_has_only_columns_with_content():
    title, (heads, *lines) = table(ROWS)

    found = [dict(zip(heads, line, strict=True)) for line in lines]
    assert title == "weight frozen"
    assert [one["implementation"] for one in found] == ["fast", "slow", "- a", "absent", "greedy"]
    assert (found[0][f"{TIMES} X Wᵀ"], found[0]["MiB"], found[0]["shape"]) == (
        "1.50 [1.00, 2.00]",
        "3",
        "64x8x100",
    )
    assert (found[1]["ms"], found[1]["tokens/s"], found[2]["ms"]) == ("3.00", "10,000", "1.00")
    assert (found[4]["remark"], found[4]["ms"], found[4]["|Δlogp|"]) == ("out of memory", DASH, "nan")
    assert table([]) == ("", []) and "dX" not in heads
    assert [line[0] for line in table(ROWS, brief=True)[1]] == ["implementation", "fast", "slow"]


def test_turns_of_an_implementation_are_one_line():
    turns = [row("ours", [seconds]) for seconds in (0.001, 0.005, 0.003)]
    for number, one in enumerate(turns):
        one["params"] = one["params"] | {"turn": number}

    assert table(turns)[1] == [["implementation", "ms"], ["ours", "3.00"]]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """With one table, whose record is beside it."""
    machine = {"device": "a machine", "versions": {"torch": "2.13.0"}}
    record = {"benchmarks": ROWS[:2], "machine_info": machine, "datetime": "2026-11-20T09:00:00"}
    (tmp_path / "run.json").write_text(json.dumps(record | {"command": ["step", "--sizes", "group=2"]}))
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table: run -->\nnumbers by hand\n<!-- end -->\nafter\n")
    return page


def test_tables_are_written_between_their_markers_and_nothing_else_changes(page):
    text = filled(page, page.parent)

    assert text.startswith(
        "before\n<!-- table: run -->\n| implementation | ms | \N{MULTIPLICATION SIGN} X Wᵀ | tokens/s | MiB |\n"
    )
    repeat = "a machine · torch 2.13.0 · 2026-11-20 · repeat: `python -m benchmarks step --sizes group=2`"
    assert text.endswith(
        f"\n\nshape 64x8x100, weight frozen · {repeat} · [record](run.json)\n<!-- end -->\nafter\n"
    )


@pytest.mark.parametrize(
    ("text", "record", "named"),
    [
        ("<!-- table: other -->\n<!-- end -->\n", "{}", "other.json cannot be read"),
        ("<!-- table: run -->\n", "{}", "has no `<!-- end -->`"),
        ("<!-- table: run -->\n<!-- end -->\n", '{"schema": 2}', "run.json cannot be read as a record"),
    ],
)
def test_what_cannot_be_filled_is_named(page, text, record, named):
    (page.parent / "run.json").write_text(record)
    page.write_text(text)

    with pytest.raises(ValueError, match=named):
        filled(page, page.parent)
