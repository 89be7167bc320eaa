"""`python -m benchmarks`, or `grpo-fast bench`: run pytest on the named benchmarks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
REMOVED = {  # commands that are gone, and what replaces them
    "smoke": "run accuracy",
    "profile": "run kernels",
    "quickstart": "run recipe",
    "readme": "run tables",
    "aot": "run `python tests/kernels/aot.py`",
    "models": "docs/models.md lists the families that were compared",
    "vllm": "docs/models.md lists the families that were compared",
    **dict.fromkeys(["pack", "turns", "scaling", "crossover"], "benchmarks/results/tried.md has its figures"),
    **dict.fromkeys(["rows", "report"], "read the JSON that --benchmark-json writes"),
    "compare": "run pytest with --benchmark-compare",
}
USAGE = """usage: {program} BENCHMARK ... [options of pytest, pytest-benchmark and these benchmarks]
       {program} tables [--check]

{benchmarks}
  tables    write the tables of README.md and docs/ from the records

`{program} head --help` lists the options. `--benchmark-json FILE` writes a record."""
WRONG_USAGE = 2


def main(arguments: Sequence[str] | None = None, *, program: str = "python -m benchmarks") -> int:
    """Run pytest; return its exit code: 0 measured, 1 something failed, 2 interrupted or wrong usage."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    files = {path.stem.removeprefix("test_"): path for path in sorted(HERE.glob("test_*.py"))}
    if arguments[:1] == ["tables"]:
        return _tables(arguments[1:])
    names = [word for word in arguments if word in files]
    unknown = [word for word in arguments[:1] if word not in files and not word.startswith("-")]
    if unknown and not Path(unknown[0].partition("::")[0]).exists():
        hint = REMOVED.get(unknown[0], f"there are {', '.join(files)} and tables")
        print(f"{program}: no benchmark {unknown[0]!r}: {hint}", file=sys.stderr)
        return WRONG_USAGE
    if not names and not unknown:
        lines = (
            f"  {name:<9} {path.read_text().partition('.')[0].strip(chr(34))}" for name, path in files.items()
        )
        print(USAGE.format(program=program, benchmarks="\n".join(lines)))
        return 0 if {"-h", "--help"} & {*arguments} else WRONG_USAGE
    try:
        import pytest

        importlib.import_module("pytest_benchmark")
    except ImportError as error:
        print(f"{program}: {error}: pip install 'grpo-fast[bench]'", file=sys.stderr)
        return WRONG_USAGE
    words = [str(files.get(word, word)) for word in arguments]
    usual = [
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--rootdir={HERE.parent}",
    ]
    return int(pytest.main([*usual, *words]))


def _tables(arguments: Sequence[str]) -> int:
    from .tables import main

    try:
        return main(arguments)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return WRONG_USAGE


if __name__ == "__main__":
    sys.exit(main())
