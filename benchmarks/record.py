"""The JSON of a run: written after every cell, read back by `compare`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.accuracy import Accuracy
from benchmarks.cell import Cell, Result
from benchmarks.problem import Setting
from benchmarks.timing import Memory, Spread

SCHEMA = 1


def save(path: Path, cells: Sequence[Cell], **about: Any) -> None:
    """Replaces `path` at once, so that an interruption leaves the previous state or this one."""
    document = {"schema": SCHEMA, **about, "cells": [asdict(cell) for cell in cells]}
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(_finite(document), indent=1, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def load(path: Path) -> tuple[list[Cell], dict[str, Any]]:
    """The cells, and everything else in the file.

    Raises:
        ValueError: not a file that `python -m benchmarks head --json` wrote.
    """
    try:
        document = json.loads(path.read_text())
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']}, this reads {SCHEMA}")
        return [_cell(cell) for cell in document.pop("cells")], document
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no benchmark record: {error}") from error


def _cell(found: dict[str, Any]) -> Cell:
    return Cell(
        **found
        | {
            "setting": Setting(**found["setting"]),
            "product": _maybe(Spread, found["product"]),
            "results": [_result(result) for result in found["results"]],
        }
    )


def _result(found: dict[str, Any]) -> Result:
    return Result(
        **found
        | {
            "time": _maybe(Spread, found["time"]),
            "memory": _maybe(Memory, found["memory"]),
            "accuracy": _maybe(Accuracy, _numbers(found["accuracy"])),
        }
    )


def _maybe(kind: type, found: dict[str, Any] | None) -> Any:
    return None if found is None else kind(**found)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; they are written as strings."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(found: dict[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {name: float(value) if isinstance(value, str) else value for name, value in found.items()}
