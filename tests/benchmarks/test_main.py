"""The command line of the benchmarks, in a checkout and as `grpo-fast bench`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks
from benchmarks.__main__ import COMMANDS, main
from grpo_fast import cli

SOURCES = Path(benchmarks.__file__).parent


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])

    assert left.value.code == 0
    assert "usage: python -m benchmarks" in capsys.readouterr().out


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


def test_an_installation_without_benchmarks_says_what_to_do(monkeypatch, capsys):
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "grpo_fast.benchmarks":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in ("grpo_fast.benchmarks", "grpo_fast.benchmarks.__main__"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])

    assert cli.main(["bench", "head"]) == 1
    assert "python -m benchmarks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("head --minutes -1", "--minutes must be at least 0"),
        ("head --json /no/such/x.json", "--json /no/such/x.json: its folder does not exist"),
        ("head --device cpu --impl nobody", "--impl 'nobody' is part of no implementation's name"),
        ("train --device cpu --group 1", "--group must be at least 2"),
        ("bias --device cpu", "--device cpu: the head's gradient is exact there"),
        ("group --device cpu --memory -1", "--memory must be above 0 GiB"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(arguments, message, capsys):
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err
