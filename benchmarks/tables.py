"""Make the table of a run, for the terminal and for the documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from grpo_fast.record.summary import duration_text, score_text

Row = dict[str, Any]  # a benchmark of pytest-benchmark's JSON; without `stats` where it was not measured
DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
ERRORS = {"logprob": "|Δlogp|", "divergence": "|ΔKL|", "loss": "|Δloss|"}
ERRORS |= {"hidden_gradient": "dX", "weight_gradient": "dW"}
LEAST_SHARE = 0.01  # of a time: phases that take less are left out


def table(rows: Sequence[Row], brief: bool = False) -> tuple[str, list[list[str]]]:
    """Return what is common to all rows, and the lines of the table, sorted by ratio or time.

    Turns of one implementation are one line, and empty columns are left out. A `brief` table has no spreads,
    phases, metrics, and rows that were not measured.
    """
    merged: dict[str, tuple[dict[str, Any], dict[str, Any], list[float]]] = {}
    for row in rows:
        about = {"peer": "", **row["params"], **row["extra_info"].get("sizes", {})}
        about.pop("turn", None)
        if "stats" in row or not brief:
            line = merged.setdefault(repr((about, "stats" in row)), (about, row["extra_info"], []))
            line[2].extend(row.get("stats", {}).get("data", []))
    # Trainers of one recipe are compared with TRL's.
    base = {
        repr(about | {"peer": ""}): median(data)
        for about, info, data in merged.values()
        if about["peer"] == "TRL" and "scores" in info and data
    }
    axes = {axis: [] for about, *_ in merged.values() for axis in about}
    for axis, values in axes.items():
        values += [number(about.get(axis, "")) for about, *_ in merged.values()]
    varying = [axis for axis, values in axes.items() if len({*values}) > 1 or (axis == "peer" and not brief)]
    settings, found = {}, []
    for about, info, data in merged.values():
        line = {axis: number(about.get(axis, "")) for axis in varying}
        time, setting = median(data) if data else math.inf, repr({**line, "peer": ""})
        if (theirs := base.get(repr(about | {"peer": ""}))) and data:
            info = info | {"ratio": time / theirs, "reference": "TRL"}
        key = settings.setdefault(setting, len(settings)), info.get("ratio", math.inf), time, len(found)
        found.append((key, line | columns(info, time, brief)))
        for name, spent in () if brief else info.get("phases", {}).items():
            if spent > LEAST_SHARE * time:
                found.append((key, {"peer": f"- {name}", "ms": number(1e3 * spent)}))
    found.sort(key=lambda line: line[0])
    heads = dict.fromkeys(head for _, line in found for head in line)
    heads = [head for head in heads if any(line.get(head) for _, line in found)]
    heads.sort(key="remark".__eq__)  # to the end
    names = ["implementation" if head == "peer" else head.replace("_", " ") for head in heads]
    common = [axis for axis in axes if axis not in (*varying, "peer")]
    title = ", ".join(f"{axis.replace('_', ' ')} {axes[axis][0]}" for axis in common)
    return title, [names, *([line.get(head) or DASH for head in heads] for _, line in found)] if found else []


def columns(info: dict[str, Any], seconds: float, brief: bool) -> dict[str, str]:
    """Return the text of each column, "" where it is empty."""
    ends = [end for end in ("before", "after") if end in info]
    found = {f"{end} [95 %]": score_text(info[end]["score"], info[end]["interval"]) for end in ends}
    if found:
        found["points"] = f"{100 * (info['after']['score'] - info['before']['score']):+.1f}"
    hidden = math.isinf(seconds) or "largest_group" in info or (found and brief)
    spread = "" if brief or "quartiles" not in info else f" [{', '.join(map(number, info['quartiles']))}]"
    scores = [f"{score_text(of['score'])} in {duration_text(of['seconds'])}" for of in info.get("scores", ())]
    found |= {
        "ms": "" if hidden else number(1e3 * seconds),
        "s/step": number(seconds) if scores and not math.isinf(seconds) else "",
        f"{TIMES} {info.get('reference')}": f"{info['ratio']:.2f}{spread}" if "ratio" in info else "",
        "tokens/s": number(info["tokens"] / seconds) if "tokens" in info else "",
        "largest_group": number(info.get("largest_group", "")),
        **{name: duration_text(info[name]) if name in info else "" for name in ("training", "whole_command")},
        "score after training": ", ".join(scores[1:]),
        "MiB": f"{info['peak_bytes'] / 2**20:,.0f}" if info.get("peak_bytes") else "",
    }
    errors = info.get("accuracy", {})
    names = [name for name in dict.fromkeys([*ERRORS, *errors]) if name in errors]
    found |= {ERRORS.get(name, name): f"{errors[name]:.1e}" for name in names}
    metrics = {} if brief else info.get("metrics", {})
    found |= {name: number(value) for name, value in metrics.items()}
    return found | {"remark": info.get("remark", "")}


def number(value: Any) -> str:
    """Write a float with three digits, a whole number with all."""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:#.3g}".rstrip(".")
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def markdown(lines: Sequence[Sequence[str]], aligned: bool = False) -> list[str]:
    lines = [lines[0], ["---", *["---:"] * (len(lines[0]) - 1)], *lines[1:]]
    widths = [max(map(len, column)) if aligned else 0 for column in zip(*lines, strict=True)]
    padded = [
        [text.replace("|", "\\|").ljust(width) for text, width in zip(line, widths, strict=True)]
        for line in lines
    ]
    return [f"| {' | '.join(line)} |" for line in padded]
