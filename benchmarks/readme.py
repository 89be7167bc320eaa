"""`python -m benchmarks readme`: writes the tables of README.md from the checked-in records.

Between `<!-- table: NAME -->` and `<!-- end -->` stands the table of `benchmarks/results/NAME.json`.
"""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path

from .readme_tables import render

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
_REGION = re.compile(r"(<!-- table: (?P<name>\S+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
_OPENED = re.compile(r"<!-- table: ")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 on a difference")
    parser.add_argument("--file", type=Path, default=ROOT / "README.md", help="README.md unless given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: no such file, a marker without its end, or a record that is missing or has no table.
    """
    if not options.file.is_file():
        raise ValueError(f"there is no {options.file}: run this in a checkout, or give --file")
    before = options.file.read_text(encoding="utf-8")
    after = with_tables(before, options.results)
    if options.check:
        for line in difflib.unified_diff(before.splitlines(), after.splitlines(), "is", "should be", n=0):
            print(line.rstrip("\n"))
        return int(before != after)
    if before != after:
        options.file.write_text(after, encoding="utf-8")
    return 0


def with_tables(text: str, results: Path) -> str:
    """`text` with every table made anew.

    Raises:
        ValueError: see `main`.
    """
    regions = list(_REGION.finditer(text))
    if len(regions) != len(_OPENED.findall(text)):
        raise ValueError("a `<!-- table: NAME -->` has no `<!-- end -->`, or another table before it")
    return _REGION.sub(lambda region: f"{region[1]}{render(_source(region, results))}\n{region[4]}", text)


def _source(region: re.Match[str], results: Path) -> Path:
    path = results / f"{region['name']}.json"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in results.glob("*.json")))
        raise ValueError(f"<!-- table: {region['name']} --> has no {path.name}; there are {known}")
    return path
