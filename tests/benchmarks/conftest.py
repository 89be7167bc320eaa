"""Subcommands on a CPU, from the command line to the record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.record import Measurement, Record, read


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Record]:
    """The record of a subcommand with these arguments."""

    def run(command: str, *arguments: str, code: int = 0) -> Record:
        out = tmp_path / "record.json"
        usual = ("--device", "cpu", "--dtype", "float32", "--minutes", "30", "--repeats", "3")
        assert main([command, *usual, "--json", str(out), *arguments]) == code
        return read(out)

    return run


def by_name(record: Record) -> dict[str, Measurement]:
    return {found.implementation: found for found in record.cells}
