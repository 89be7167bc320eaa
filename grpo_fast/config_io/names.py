"""Every dotted name that the configuration has, and the nearest ones to a name that it does not have."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from grpo_fast.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Field:
    """One key of the configuration."""

    name: str  # dotted; an item of a list is written as its list: `rewards.weight`
    description: str
    free_form: bool = False  # a mapping whose keys are the user's


@cache
def fields() -> dict[str, Field]:
    """All keys by dotted name, sections before what they hold."""
    return {field.name: field for field in _walk(TrainConfig, "")}


def exists(name: str) -> bool:
    """Whether a dotted name is a key; list positions are left out, free-form mappings take any key."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    for end in range(len(parts), 0, -1):
        field = fields().get(".".join(parts[:end]))
        if field is not None:
            return end == len(parts) or field.free_form
    return False


def nearest(name: str, extra: tuple[str, ...] = (), limit: int = 3) -> list[str]:
    """Up to `limit` known names that a misspelt one may mean, the likeliest first.

    Keys of the same section come first, then names alike as a whole, then the same last part elsewhere.
    `extra`: further names to choose from.
    """
    parts = [part for part in name.split(".") if not part.isdigit()]
    parent, leaf = ".".join(parts[:-1]), parts[-1]
    names = [*fields(), *extra]
    leaves: dict[str, list[str]] = {}
    for known in names:
        leaves.setdefault(known.rpartition(".")[2], []).append(known)
    siblings = {k.rpartition(".")[2]: k for k in names if k.rpartition(".")[0] == parent}
    found = [siblings[match] for match in difflib.get_close_matches(leaf, siblings, limit, 0.7)]
    found += leaves.get(leaf, [])
    found += difflib.get_close_matches(".".join(parts), names, limit, 0.75)
    found += [
        full for match in difflib.get_close_matches(leaf, leaves, limit, 0.75) for full in leaves[match]
    ]
    return list(dict.fromkeys(found))[:limit]


def _walk(model: type, prefix: str) -> Iterator[Field]:
    for key, annotation, description in _members(model):
        name = f"{prefix}{key}"
        inner = _section(annotation)
        yield Field(name, description, free_form=typing.get_origin(annotation) is dict)
        if inner is not None:
            yield from _walk(inner, f"{name}.")


def _members(model: type) -> Iterator[tuple[str, Any, str]]:
    if issubclass(model, BaseModel):
        for key, info in model.model_fields.items():
            yield key, info.annotation, info.description or ""
        return
    hints = typing.get_type_hints(model)
    for member in dataclasses.fields(model):
        yield member.name, hints[member.name], ""


def _section(annotation: Any) -> type | None:
    """The model or dataclass inside `X`, `X | None` or `list[X]`; none for a plain value."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        is_section = issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)
        return annotation if is_section else None
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, typing.Annotated):
        return next(filter(None, map(_section, typing.get_args(annotation))), None)
    return None
