"""Apply `dataset.transform`, the user's function that adds or replaces columns of a row."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.lookup import load_callable, raised_at
from grpo_fast.config.section import short
from grpo_fast.data.files import Row, row_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SIGNATURES = (
    "a transform takes (example), and tokenizer or idx (the row's number) if it names them, and returns "
    "{column: value} to add or replace. Axolotl's takes (cfg, ...) and returns such a function, or it and "
    "{remove_columns: [columns of the data]}"
)
GIVEN = {"tokenizer", "idx"}  # arguments that a transform may name


def transformed(
    rows: Sequence[Row], config: DatasetConfig, tokenizer: PreTrainedTokenizerBase | None
) -> list[Row]:
    """Return the rows with the columns that `dataset.transform` returns for a copy of each."""
    changed: list[Row] = []
    folder, due = os.getcwd(), time.monotonic() + 10
    try:
        function, asked, removed = _load(config, rows[0])
        for index, row in enumerate(rows):
            given = {"tokenizer": tokenizer, "idx": index}
            with row_named(config, index):
                added = _columns(function, row, config, {name: given[name] for name in asked})
            changed.append({name: row[name] for name in row if name not in removed} | added)
            if time.monotonic() > due:
                logger.warning("dataset.transform: %d of %d rows", index + 1, len(rows))
                due += 10
    finally:
        os.chdir(folder)
    return changed


def _load(config: DatasetConfig, columns: Row) -> tuple[Callable[..., Any], set[str], set[str]]:
    """Return the function of a row, the names of its other arguments, and the columns that it removes."""
    function, removed = load_callable(str(config.transform), "dataset.transform"), set[str]()
    if next(iter(names := inspect.signature(function).parameters), "").strip("_") == "cfg":
        returned = _called(config, function, config, **({"dataset_idx": 0} if "dataset_idx" in names else {}))
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        function, settings = returned if is_pair else (returned, {})
        named = settings.get("remove_columns", []) if isinstance(settings, Mapping) else []
        removed = {*(columns if named == "__all__" else named)}
        if not callable(function) or {*settings} - {"remove_columns"} or removed - {*columns}:
            raise ValueError(f"dataset.transform = {config.transform!r} returned {returned!r}: {SIGNATURES}")
    signature = inspect.signature(function)
    asked = GIVEN & signature.parameters.keys()
    try:
        signature.bind(columns, **dict.fromkeys(asked))
    except TypeError as error:
        named = f"dataset.transform = {config.transform!r} has the signature {signature}"
        raise ValueError(f"{named} ({error}): {SIGNATURES}") from None
    return function, asked, removed


def _called(config: DatasetConfig, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except (Exception, SystemExit) as error:
        problem = f"raised {type(error).__name__}: {error}{raised_at(error)}"
        raise ValueError(f"dataset.transform = {config.transform!r} {problem}") from error


def _columns(
    function: Callable[..., Any], row: Row, config: DatasetConfig, options: Mapping[str, Any]
) -> Row:
    returned = _called(config, function, copy.deepcopy(row), **options)
    named = f"dataset.transform = {config.transform!r} returned"
    if not isinstance(returned, Mapping):
        filters = "to leave rows out, filter the data before; " if returned is None else ""
        raise ValueError(f"{named} {short(returned)}: {filters}{SIGNATURES}")
    before = {new: old for old, new in config.rename.items()}
    prompt = returned.get(before.get(config.prompt_column, config.prompt_column))
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | list | tuple):
        batched = "it is written for map(..., batched=True); write it for one row"
        raise ValueError(f"{named} several prompts, {short(prompt)}: {batched}")
    columns: Row = _plain(returned, named)
    return columns


def _plain(value: Any, place: str) -> Any:
    """Copy a value as plain Python; raise ValueError for a type that data does not have."""
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy or torch
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{place} {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place} [{index}]") for index, item in enumerate(value)]
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, str | int | float | bytes | None):
        return value
    if library in ("datetime", "decimal", "pandas", "PIL"):
        return value
    kind = f"{short(value)}, a {type(value).__name__}"
    raise ValueError(f"{place} = {kind}; return text, numbers, lists, or dicts with keys of text")
