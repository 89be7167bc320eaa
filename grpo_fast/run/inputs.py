"""Name the objects of a Python call, so that a configuration can refer to them.

A configuration has `module:name@python` for a function or an object, and `dataset@python` for rows. The same
call gives the same names, so a resumed run finds its objects when the call is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fast.config.keys import ConfigError, Problem
from grpo_fast.config.lookup import FROM_PYTHON
from grpo_fast.config.section import short
from grpo_fast.record.callbacks import Callback


class Inputs:
    """The objects of one call, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def plain(self, value: Any) -> Any:
        """Return a setting as a file would have it: paths as text, functions and objects by name."""
        if isinstance(value, Mapping):
            return {str(key): self.plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value]
        if isinstance(value, Path):
            return str(value)
        return self.name(value) if callable(value) or isinstance(value, Callback) else value

    def name(self, value: Any) -> str:
        """Return the name of a function, a class or an object of one; each object has its own."""
        known = value
        while isinstance(known, partial):
            known = known.func
        known = known if hasattr(known, "__qualname__") else type(known)
        path, number = f"{known.__module__}:{known.__qualname__}", 1
        name = f"{path}{FROM_PYTHON}"
        while self.objects.setdefault(name, value) is not value:  # another object of one class or one name
            number += 1
            name = f"{path}_{number}{FROM_PYTHON}"
        return name

    def model(self, value: Any) -> Any:
        if isinstance(value, str | Path | Mapping):
            return value if isinstance(value, Mapping) else {"path": value}
        remedy = "give a folder or hub id; save_pretrained makes a folder of a model and its tokenizer"
        raise _refused("model", f"is a {type(value).__name__}: {remedy}")

    def rewards(self, value: Any) -> list[Any]:
        entries = value if isinstance(value, list | tuple) else [value]
        return [one if isinstance(one, Mapping) else {"reward": one} for one in entries]

    def dataset(self, value: Any, key: str = "dataset") -> dict[str, Any]:
        """Return the section; rows have a name in it."""
        if type(value).__name__.endswith("DatasetDict"):
            raise _refused(key, f"is several splits: give one of {', '.join(map(repr, value))}")
        section = dict(value) if isinstance(value, Mapping) else {"source": value}
        source = section.get("source", "")
        if not isinstance(source, str | Path):
            section["source"] = f"{key}{FROM_PYTHON}"
            self.objects[section["source"]] = _rows(source, key)
        return section

    def evaluation(self, value: Any) -> dict[str, Any]:
        section = {**value} if isinstance(value, Mapping) else {"dataset": value}
        if section.get("dataset") is not None:
            section["dataset"] = self.dataset(section["dataset"], "evaluation.dataset")
        return section


def _rows(rows: Any, key: str) -> list[dict[str, Any]]:
    """Return rows with NumPy's arrays and numbers as Python's."""
    if not isinstance(rows, Iterable):
        raise _refused(key, f"is a {type(rows).__name__}: give rows, a file or a hub id")
    plain = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            remedy = "a row is a dict of columns; a pandas DataFrame gives them by to_dict('records')"
            raise _refused(f"{key}[{index}]", f"is a {type(row).__name__} ({short(row)}): {remedy}")
        plain.append({k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()})
    if not plain:
        raise _refused(key, "has no rows")
    return plain


def _refused(key: str, problem: str) -> ConfigError:
    return ConfigError("train", [Problem(key, problem)])
