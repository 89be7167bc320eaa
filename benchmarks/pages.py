"""Write the tables of README.md and docs/ from the records.

The table between `<!-- table: NAME -->` and `<!-- end -->` is made of `results/NAME.json`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from .tables import markdown, table

HERE = Path(__file__).resolve().parent
_REGION = re.compile(r"(<!-- table: (?P<name>\S+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def filled(page: Path, results: Path) -> str:
    """Return the text of a page with new tables.

    Raises:
        ValueError: a marker has no end, or a file is not a record.
    """
    text = page.read_text(encoding="utf-8")
    if len(_REGION.findall(text)) != text.count("<!-- table: "):
        raise ValueError(f"{page}: a `<!-- table: NAME -->` has no `<!-- end -->`")

    def fill(region: re.Match[str]) -> str:
        path = results / f"{region['name']}.json"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            (title, lines), machine = table(record["benchmarks"], brief=True), record["machine_info"]
            origin = f"{machine['device']} · torch {machine['versions']['torch']} · {record['datetime'][:10]}"
            repeat = f"repeat: `python -m benchmarks {shlex.join(record['command'])}`"
        except (OSError, ValueError, LookupError) as error:
            raise ValueError(f"{path} cannot be read as a record: {error!r}") from error
        origin = f"{title} · {origin} · {repeat} · [record]({os.path.relpath(path, page.parent)})"
        return "\n".join([region[1][:-1], *markdown(lines), "", origin, region[4]])

    return _REGION.sub(fill, text)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 on a difference")
    check, changed = parser.parse_args(arguments).check, False
    for page in (HERE.parent / "README.md", *sorted((HERE.parent / "docs").glob("*.md"))):
        try:
            before, after = page.read_text(encoding="utf-8"), filled(page, HERE / "results")
        except ValueError as error:
            parser.error(str(error))
        changed |= before != after
        if check:
            print(*difflib.unified_diff(before.splitlines(), after.splitlines(), str(page), n=0), sep="\n")
        else:
            page.write_text(after, encoding="utf-8")
    return int(changed and check)
