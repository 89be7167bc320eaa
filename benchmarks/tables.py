"""The one table: on the screen after a run, and in README.md and docs/ from the records.

A record is pytest-benchmark's JSON. Between `<!-- table: NAME -->` and `<!-- end -->` of a page stands the
table of `results/NAME.json`. `python -m benchmarks tables` writes them; `--check` only compares.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_fast.record.summary import duration_text, score_text

Row = dict[str, Any]  # a benchmark of pytest-benchmark's JSON; without `stats` where it was not measured
HERE = Path(__file__).resolve().parent
DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
LEAST_SHARE = 0.01  # of a time: phases that take less are left out
ERRORS = {"logprob": "|Δlogp|", "loss": "|Δloss|", "hidden_gradient": "dX", "weight_gradient": "dW"}
NOTES = {"arithmetic": str, "largest_group": str, "training": duration_text, "whole_command": duration_text}
_REGION = re.compile(r"(<!-- table: (?P<name>\S+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def table(rows: Sequence[Row], brief: bool = False) -> tuple[str, list[list[str]]]:
    """Return what all rows agree on, and lines under their heads, by the ratio to the reference or time.

    Turns of one implementation are one line. Columns without content are left out. A `brief` table also
    leaves out spreads, phases, metrics, and what was not measured.
    """
    merged: dict[str, tuple[Row, dict[str, Any], list[float]]] = {}
    for row in rows:
        about = {**row["params"], **row["extra_info"].get("sizes", {})}
        about.pop("turn", None)
        seconds = row["stats"]["data"] if "stats" in row else []
        if seconds or not brief:
            merged.setdefault(repr((about, bool(seconds))), (row, about, []))[2].extend(seconds)
    axes = list(dict.fromkeys(axis for _, about, _ in merged.values() for axis in about if axis != "peer"))
    values = {axis: [number(about.get(axis, "")) for _, about, _ in merged.values()] for axis in axes}
    constant = [axis for axis in axes if len({*values[axis]}) == 1]
    settings: dict[str, int] = {}
    found: list[tuple[tuple[float, ...], dict[str, str]]] = []
    for row, about, seconds in merged.values():
        info, median = row["extra_info"], statistics.median(seconds) if seconds else math.inf
        line = {axis: number(about.get(axis, "")) for axis in axes if axis not in constant}
        key = settings.setdefault(repr(line), len(settings)), info.get("ratio", math.inf), median, len(found)
        found.append((key, {"implementation": about.get("peer", "")} | line | columns(info, median, brief)))
        for name, spent in () if brief else info.get("phases", {}).items():
            if spent > LEAST_SHARE * median:
                found.append((key, {"implementation": f"- {name}", "ms": number(1e3 * spent)}))
    found.sort(key=lambda line: line[0])
    heads = dict.fromkeys(head for _, line in found for head in line)
    heads = [head for head in heads if any(line.get(head) for _, line in found)]
    lines = [[line.get(head) or DASH for head in heads] for _, line in found]
    title = ", ".join(f"{axis.replace('_', ' ')} {values[axis][0]}" for axis in constant if values[axis][0])
    return title, [[head.replace("_", " ") for head in heads], *lines] if lines else []


def columns(info: dict[str, Any], median: float, brief: bool) -> dict[str, str]:
    """Return the text of each column, "" where there is nothing."""
    ends = [info[end] for end in ("before", "after") if end in info]
    found = {
        name: score_text(of["score"], of["interval"])
        for name, of in zip(("before", "after"), ends, strict=False)
    }
    if ends:
        found["points"] = f"{100 * (ends[1]['score'] - ends[0]['score']):+.1f}"
    if median < math.inf and "largest_group" not in info and not (ends and brief):
        found["ms"] = number(1e3 * median)
    if "ratio" in info:
        spread = "" if brief else f" [{', '.join(map(number, info['quartiles']))}]"
        found[f"{TIMES} {info['reference']}"] = f"{info['ratio']:.2f}{spread}"
    found["tokens/s"] = number(info["tokens"] / median) if "tokens" in info else ""
    found |= {name: text(info[name]) for name, text in NOTES.items() if name in info}
    found["MiB"] = f"{info['peak_bytes'] / 2**20:,.0f}" if info.get("peak_bytes") else ""
    found |= {ERRORS.get(name, name): f"{error:.1e}" for name, error in info.get("accuracy", {}).items()}
    found |= {} if brief else {name: number(value) for name, value in info.get("metrics", {}).items()}
    return found | {"remark": info.get("remark", "")}


def number(value: Any) -> str:
    """Return three digits of a float, all of a whole number."""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:#.3g}".rstrip(".")
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value).replace("_", " ")


def markdown(lines: Sequence[Sequence[str]], aligned: bool = False) -> list[str]:
    """Return the lines of the table in Markdown."""
    lines = [lines[0], ["---", *["---:"] * (len(lines[0]) - 1)], *lines[1:]]
    widths = [max(map(len, column)) if aligned else 0 for column in zip(*lines, strict=True)]
    cells = [
        [text.replace("|", "\\|").ljust(width) for text, width in zip(line, widths, strict=True)]
        for line in lines
    ]
    return [f"| {' | '.join(line)} |" for line in cells]


def filled(page: Path, results: Path) -> str:
    """Return the text of a page with its tables as the records have them.

    Raises:
        ValueError: a marker without its end, or a file that is no record.
    """
    text = page.read_text(encoding="utf-8")
    if len(_REGION.findall(text)) != text.count("<!-- table: "):
        raise ValueError(f"{page}: a `<!-- table: NAME -->` has no `<!-- end -->`")

    def fill(region: re.Match[str]) -> str:
        path = results / f"{region['name']}.json"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            title, lines = table(record["benchmarks"], brief=True)
            machine, command = record["machine_info"], shlex.join(record["command"])
            origin = f"{machine['device']} · torch {machine['versions']['torch']} · {record['datetime'][:10]}"
        except (OSError, ValueError, LookupError) as error:
            raise ValueError(f"{path} cannot be read as a record: {error!r}") from error
        links = f"repeat: `python -m benchmarks {command}` · [record]({os.path.relpath(path, page.parent)})"
        return "\n".join([region[1][:-1], *markdown(lines), "", f"{title} · {origin} · {links}", region[4]])

    return _REGION.sub(fill, text)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 on a difference")
    check, changed = parser.parse_args(arguments).check, False
    for page in (HERE.parent / "README.md", *sorted((HERE.parent / "docs").glob("*.md"))):
        before, after = page.read_text(encoding="utf-8"), filled(page, HERE / "results")
        changed |= before != after
        if check:
            print(
                *difflib.unified_diff(before.splitlines(), after.splitlines(), str(page), "should be", n=0),
                sep="\n",
            )
        else:
            page.write_text(after, encoding="utf-8")
    return int(changed and check)
