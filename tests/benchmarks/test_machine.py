"""Where a measurement was made."""

from __future__ import annotations

from pathlib import Path

from benchmarks import machine


def test_the_command_is_what_one_would_type_and_no_path_of_the_machine():
    folder = Path(machine.__file__).parent

    assert machine._command([str(folder / "__main__.py"), "head", "--minutes", "2"]) == [
        *("python", "-m", "benchmarks", "head", "--minutes", "2")
    ]
    assert machine._command([str(folder / "quickstart.py")]) == ["python", "-m", "benchmarks.quickstart"]
    assert machine._command(["/some/where/bin/grpo-fast", "bench"]) == ["grpo-fast", "bench"]


def test_where_the_results_of_a_command_went_is_not_part_of_it():
    typed = ["bench", "head", "--rows", "flat", "--json", "/some/where/out.json", "--repeats", "3"]

    assert machine._command(["/some/where/bin/grpo-fast", *typed]) == [
        *("grpo-fast", "bench", "head", "--rows", "flat", "--repeats", "3")
    ]
