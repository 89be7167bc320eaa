"""Write the tables of README.md and docs/ from the records.

Between `<!-- table: NAME -->` and `<!-- end -->` stands the table of `benchmarks/results/NAME.json`, with a
line that says where its numbers were made.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from grpo_fast.record.summary import duration_text, score_text

from .record import read
from .tables import markdown, table

HERE = Path(__file__).resolve().parent
_REGION = re.compile(r"(<!-- table: (?P<name>\S+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def render(path: Path, link: str) -> str:
    """Return the table of one record, and its origin with a `link` to the file.

    Raises:
        ValueError: the file is missing, or of no kind that has a table.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a record: {error}") from error
    if "schema" in found:
        record = read(path)
        title, *shown = table(record.cells, brief=True)
        text, origin = markdown(*shown), _origin(record.environment, title, record.environment["command"])
    elif "recipe" in found:
        text, origin = _recipe(found)
    elif "study" in found:
        text = "\n\n".join(markdown(one["heads"], one["rows"]) for one in found["tables"])
        origin = _origin(found["environment"], found["study"])
    else:
        raise ValueError(f"{path} is of no kind that has a table: it holds {', '.join(found)}")
    return f"{text}\n\n{origin} · [record]({link})"


def _origin(about: dict[str, Any], fact: str, command: list[str] | None = None) -> str:
    made = f"repeat: `{shlex.join(command)}`" if command else f"at revision {about['revision']}"
    where = f"{about['device']} · torch {about['versions']['torch']} · {about['started'][:10]}"
    return f"{fact} · {where} · {made}"


def _recipe(found: dict[str, Any]) -> tuple[str, str]:
    rows, runs, overrides = [], found["runs"], found["overrides"]
    compared = len({(run.get("trainer"), run.get("part")) for run in runs}) > 1
    for run in runs:
        before, after = run["before"], run["after"]
        of_trainer = {"trainer": run["trainer"], "part": run["part"]} if compared else {}
        row = of_trainer | {
            "seed": str(run["seed"]),
            "before": score_text(before["score"], before["interval"]),
            "after": score_text(after["score"], after["interval"]),
            "points": f"{100 * (after['score'] - before['score']):+.1f}",
            **({"arithmetic": run["arithmetic"]} if "arithmetic" in run else {}),
        }
        if compared:
            row |= {"a step": f"{run['seconds_of_a_step']:.3g} s", "GiB": f"{run['peak_bytes'] / 2**30:.2f}"}
        if not overrides:
            row |= {"training": duration_text(run["seconds_training"])}
            row |= {"whole command": duration_text(run["seconds_wall"])}
        rows.append(row)
    recipe = ["--recipe", found["recipe"]] if found["recipe"] != "quickstart" else []
    for option in ("trainer", "part") if compared else ():
        recipe += [f"--{option}", *dict.fromkeys(run[option] for run in runs)]
    command = ["python", "-m", "benchmarks", "quickstart", *recipe, *overrides]
    fact = f"{runs[0]['after']['n']} held-out questions, 95 % intervals"
    text = markdown(list(rows[0]), [[*row.values()] for row in rows])
    return text, _origin(runs[0]["provenance"], fact, command)


def filled(page: Path, results: Path) -> str:
    """Return the text of a page with its tables as the records have them.

    Raises:
        ValueError: a marker without its end, or a record that is missing or has no table.
    """
    text = page.read_text(encoding="utf-8")
    if len(_REGION.findall(text)) != text.count("<!-- table: "):
        raise ValueError(f"{page}: a `<!-- table: NAME -->` has no `<!-- end -->`")

    def fill(region: re.Match[str]) -> str:
        path = results / f"{region['name']}.json"
        return f"{region[1]}{render(path, link=os.path.relpath(path, page.parent))}\n{region[4]}"

    return _REGION.sub(fill, text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 on a difference")


def main(options: argparse.Namespace) -> int:
    changed = False
    for page in (HERE.parent / "README.md", *sorted((HERE.parent / "docs").glob("*.md"))):
        before, after = page.read_text(encoding="utf-8"), filled(page, HERE / "results")
        changed |= before != after
        if options.check:
            lines = before.splitlines(), after.splitlines()
            print(*difflib.unified_diff(*lines, str(page), "should be", n=0, lineterm=""), sep="\n")
        else:
            page.write_text(after, encoding="utf-8")
    return int(changed and options.check)
