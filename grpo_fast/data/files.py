"""Rows of local files: JSON, CSV, Parquet.

The standard library reads JSON and CSV: `datasets` would turn `007` into 7, dates into objects, and asks the
network.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_fast.config.data import SUFFIXES, DatasetConfig
from grpo_fast.config.paths import user_path
from grpo_fast.config.secrets import redacted
from grpo_fast.config.section import short

Row = dict[str, Any]
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def files_of(config: DatasetConfig) -> list[Path]:
    """Return the source, or what a folder has of the split, as `data/train-00000-of-00002.parquet`.

    A source that may be a hub id has none.
    """
    source, path = f"dataset.source = {redacted(config.source)!r}", user_path(config.source, "dataset.source")
    if path.is_file():
        if path.suffix not in SUFFIXES:
            unpack = " (unpack it with gunzip first)" if path.suffix == ".gz" else ""
            raise ValueError(f"{source}: the suffix must be one of {', '.join(SUFFIXES)}{unpack}")
        return [path]
    if not path.is_dir():
        if path.suffix in SUFFIXES or not HUB_ID.fullmatch(config.source):
            raise FileNotFoundError(f"{source}: there is no such file")
        return []
    folders = [path / config.name] if config.name else [path, path / "data"]
    files = sorted(file for folder in folders for file in folder.glob("*") if file.is_file())
    held = [file for file in files if file.suffix in SUFFIXES]
    found = [file for file in held if re.split(r"[-.]", file.name)[0] == config.split]
    if len({file.suffix for file in found}) != 1:
        raise ValueError(
            f"{source} needs files of one kind, {', '.join(SUFFIXES)}, whose names begin with dataset.split "
            f"= {config.split!r}; it has {short([file.name for file in held], limit=200)}"
        )
    return found


def file_rows(files: Sequence[Path]) -> Iterable[Row]:
    """Return the rows of files of one kind; raise ValueError for one that cannot be read, with its place."""
    if (delimiter := {".csv": ",", ".tsv": "\t"}.get(files[0].suffix)) is not None:
        return typed_rows([row for path in files for row in _cells(path, delimiter)])
    return _objects(files)


def _objects(files: Iterable[Path]) -> Iterator[Row]:
    for path in files:
        read = _parquet_rows if path.suffix == ".parquet" else _json_rows
        for index, row in enumerate(read(path)):
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}, row {index}: a row is an object, {{column: value}}, got {short(row)}"
                )
            yield row


@contextmanager
def row_named(config: DatasetConfig, index: int) -> Iterator[None]:
    """Begin an error about a row with its place; the first row is row 0."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{config.source}, row {index}: {error}") from error


def _json_rows(path: Path) -> Iterable[Any]:
    """Return the objects of one array, or one for each line."""
    text = _text(path)
    is_array = text.lstrip().startswith("[")
    parts = [text] if is_array else text.split("\n")
    rows: list[Any] = []
    for number, part in enumerate(parts, 1):
        try:
            rows += [json.loads(part, object_pairs_hook=_unique)] if part.strip() else []
        except RecursionError:
            raise ValueError(f"{path}, line {number}: is nested too deeply") from None
        except ValueError as error:
            kind = "rows are JSON, one object a line or one array of objects"
            raise ValueError(f"{path}, line {number}: {error}; {kind}") from None
    return rows[0] if is_array else rows


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = max(row, key=[name for name, _ in pairs].count)
        raise ValueError(f"the key {twice!r} is given twice in one object; keep one")
    return row


def typed_rows(rows: Sequence[dict[str, str]]) -> Iterable[Row]:
    """Return rows of text, numbers and None for rows of cells; a column has one type, see `_typed`."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _typed([row.get(name, "") for row in rows]) for name in names}
    return ({name: columns[name][index] for name in row} for index, row in enumerate(rows))


def _cells(path: Path, delimiter: str) -> list[dict[str, str]]:
    csv.field_size_limit(sys.maxsize)
    table = csv.reader(io.StringIO(_text(path), newline=""), strict=True, delimiter=delimiter)
    rows: list[list[str]] = []
    line = 1
    try:
        for fields in table:
            if fields and len(fields) != len(rows[0] if rows else fields):
                mark = {",": "comma", "\t": "tab"}[delimiter]
                counts = f"{len(fields)} fields, but the header has {len(rows[0])}"
                raise ValueError(
                    f"{path}, line {line}: {counts}: {short(fields)}; a {mark} parts fields, and a field "
                    f"that holds a {mark} is quoted"
                )
            rows += [fields] * bool(fields)
            line = table.line_num + 1
    except csv.Error as error:
        rule = 'a field that begins with a quote (") ends with one, and doubles each quote in between'
        raise ValueError(f"{path}, line {line}: {error}; {rule}") from None
    header, *cells = rows or [[]]
    if len(set(header)) < len(header):
        raise ValueError(f"{path}: the header names {max(header, key=header.count)!r} twice; rename one")
    return [dict(zip(header, fields, strict=True)) for fields in cells]


def _typed(cells: Sequence[str]) -> list[Any]:
    """Return a column as integers, floats or booleans if Python writes each value as its cell, else as text.

    An empty cell is None.
    """
    kinds: tuple[Callable[[str], Any], ...] = (int, float, {"True": True, "False": False}.get)
    for kind in kinds if not {"None", "nan", "inf", "-inf"} & {*cells} else ():  # these are words
        with suppress(ValueError):
            values = [kind(cell) if cell else None for cell in cells]
            if all(str(value) == cell for value, cell in zip(values, cells, strict=True) if cell):
                return values
    return [cell or None for cell in cells]


def _parquet_rows(path: Path) -> Iterator[Row]:
    from datasets import Dataset

    try:
        yield from Dataset.from_parquet(str(path), streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        near = error.object[max(0, error.start - 20) : error.start + 20]
        raise ValueError(f"{path}, line {line}: is no UTF-8, near {near!r}; save the file as UTF-8") from None
