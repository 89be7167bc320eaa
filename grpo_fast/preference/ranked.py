"""Ranked groups in a file: one JSON object a line, `{"prompt", "group": [{"response", "rank"}, ...]}`.

| field | |
|---|---|
| `prompt` | text, or a list of messages |
| `group` | at least two responses |
| `group[i].response` | text |
| `group[i].rank` | 1 is best; equal ranks are ties |
| `group[i].score` | instead of ranks, for the whole group: higher is better; equal scores are ties |
| `group[i].logprob` | optional: log-probability of the response under the policy that wrote it, summed |
| `group_type` | optional: text; evaluation reports each type of its own |
| `weight` | optional: factor of the group's loss |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from grpo_fast.data.types import Message
from grpo_fast.run_record.jsonl import JsonlLog, read_jsonl

_GROUP_KEYS = {"response", "rank", "score", "logprob"}


@dataclass(frozen=True)
class RankedResponse:
    """A response and what it deserves."""

    response: str
    grade: float  # higher is better
    logprob: float | None = None  # under the policy that wrote it, summed


@dataclass(frozen=True)
class RankedGroup:
    """A prompt's responses, in the order of the file."""

    prompt: str | list[Message]
    responses: tuple[RankedResponse, ...]
    group_type: str | None = None
    weight: float = 1.0


def parse_group(row: Mapping[str, Any], where: str, prompt: str | list[Message] | None = None) -> RankedGroup:
    """Read one row.

    Args:
        row: as above. Keys that are null count as absent: Arrow gives every item the keys of all others.
        where: the file and line, for error messages.
        prompt: the prompt, where it is not in the row.

    Raises:
        ValueError: names `where`, the field, its value and the remedy.
    """
    prompt = row.get("prompt") if prompt is None else prompt
    if not prompt or not isinstance(prompt, str | list):
        raise ValueError(f"{where}: prompt = {prompt!r} must be text or a list of messages")
    items = row.get("group")
    if not isinstance(items, Sequence) or isinstance(items, str) or len(items) < 2:
        raise ValueError(f"{where}: group = {_short(items)} must be a list of at least two responses")
    kind = _grade_field(items, where)
    responses = tuple(_response(item, kind, f"{where}: group[{i}]") for i, item in enumerate(items))
    _check_contradictions(responses, where)
    group_type = row.get("group_type")
    if group_type is not None and not isinstance(group_type, str):
        raise ValueError(f"{where}: group_type = {group_type!r} must be text")
    weight = row.get("weight")
    weight = 1.0 if weight is None else _number(weight, f"{where}: weight")
    if weight < 0:
        raise ValueError(f"{where}: weight = {weight} must not be negative; swap the ranks instead")
    return RankedGroup(prompt, responses, group_type, weight)


def read_ranked(path: str | Path) -> list[RankedGroup]:
    """The groups of a JSONL file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line that is no group; the message names the line and the field.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    return [
        parse_group(row, f"{path}, line {number}") for number, row in enumerate(read_jsonl(path), start=1)
    ]


def write_ranked(path: str | Path, groups: Iterable[RankedGroup]) -> None:
    """Write groups as `read_ranked` reads them, grades as scores. An existing file is replaced."""
    log = JsonlLog(Path(path))
    try:
        log.truncate(0)
        log.append(*map(_row, groups))
    finally:
        log.close()


def _row(group: RankedGroup) -> dict[str, Any]:
    items = [
        {"response": r.response, "score": r.grade} | ({} if r.logprob is None else {"logprob": r.logprob})
        for r in group.responses
    ]
    row: dict[str, Any] = {"prompt": group.prompt, "group": items}
    if group.group_type is not None:
        row["group_type"] = group.group_type
    return row if group.weight == 1.0 else row | {"weight": group.weight}


def _grade_field(items: Sequence[Any], where: str) -> str:
    """`rank` or `score`: what all items of the group have."""
    found = []
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(
                f"{where}: group[{i}] = {_short(item)} must be an object with response and rank or score"
            )
        unknown = sorted(key for key, value in item.items() if value is not None and key not in _GROUP_KEYS)
        if unknown:
            raise ValueError(
                f"{where}: group[{i}].{unknown[0]} is no field; there are {', '.join(sorted(_GROUP_KEYS))}"
            )
        kinds = [key for key in ("rank", "score") if item.get(key) is not None]
        if len(kinds) != 1:
            given = "both rank and score" if kinds else "neither rank nor score"
            raise ValueError(f"{where}: group[{i}] has {given}; give one of them")
        found.append(kinds[0])
    if len(set(found)) > 1:
        raise ValueError(f"{where}: group mixes rank and score; give all responses the same one")
    return found[0]


def _response(item: Mapping[str, Any], kind: str, where: str) -> RankedResponse:
    text = item.get("response")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}.response = {_short(text)} must be text that is not empty")
    grade = _number(item[kind], f"{where}.{kind}")
    if kind == "rank" and grade < 1:
        raise ValueError(f"{where}.rank = {item[kind]!r} must be 1 or more; 1 is best")
    logprob = item.get("logprob")
    if logprob is not None:
        logprob = _number(logprob, f"{where}.logprob")
        if logprob > 0:
            raise ValueError(
                f"{where}.logprob = {logprob} must not be above zero: it is the log of a probability"
            )
    return RankedResponse(text, -grade if kind == "rank" else grade, logprob)


def _check_contradictions(responses: Sequence[RankedResponse], where: str) -> None:
    first: dict[str, int] = {}
    for i, response in enumerate(responses):
        earlier = first.setdefault(response.response, i)
        if responses[earlier].grade != response.grade:
            raise ValueError(
                f"{where}: group[{earlier}] and group[{i}] are the same response with different grades; "
                "keep one"
            )


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{where} = {value!r} must be a finite number")
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
