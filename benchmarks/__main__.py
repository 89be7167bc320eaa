"""`python -m benchmarks`, or `grpo-fast bench`: run pytest on the named benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

HERE = Path(__file__).resolve().parent
USAGE = """usage: {program} BENCHMARK ... [options of pytest, pytest-benchmark and these benchmarks]
       {program} tables [--check]

{benchmarks}
  tables    write the tables of README.md and docs/ from the records

`{program} head --help` lists the options. `--benchmark-json FILE` writes a record."""
WRONG_USAGE = 2


def main(arguments: Sequence[str] | None = None, *, program: str = "python -m benchmarks") -> int:
    """Run pytest; return its exit code: 0 measured, 1 a benchmark failed, 2 interrupted or wrong usage."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    files = {path.stem.removeprefix("test_"): path for path in sorted(HERE.glob("test_*.py"))}
    if arguments[:1] == ["tables"]:
        from .pages import main as write_tables

        return write_tables(arguments[1:])
    names = [*takewhile(lambda word: not word.startswith("-"), arguments)]
    for name in names:
        if name not in files and not Path(name.partition("::")[0]).exists():
            known = f"there are {', '.join(files)} and tables (docs/removed.md has those that are gone)"
            print(f"{program}: no benchmark {name!r}: {known}", file=sys.stderr)
            return WRONG_USAGE
    if not names:
        titles = {name: path.read_text().partition(".")[0].strip('"') for name, path in files.items()}
        lines = [f"  {name:<9} {title}" for name, title in titles.items()]
        print(USAGE.format(program=program, benchmarks="\n".join(lines)))
        return 0 if {"-h", "--help"} & {*arguments} else WRONG_USAGE
    try:
        import pytest
        import pytest_benchmark  # noqa: F401
    except ImportError as error:
        print(f"{program}: {error}: pip install 'grpo-fast[bench]'", file=sys.stderr)
        return WRONG_USAGE
    words = [*(str(files.get(name, name)) for name in names), *arguments[len(names) :]]
    usual = ["--import-mode=importlib", "-pno:cacheprovider", "-pno:xdist", f"--rootdir={HERE.parent}"]
    return int(pytest.main([*usual, *words]))


if __name__ == "__main__":
    sys.exit(main())
