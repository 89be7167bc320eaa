"""Read rows of local JSON, CSV and Parquet files.

JSON and CSV go through the standard library: `datasets` turns `007` into 7 and dates into objects.
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
    """Return the source file, or the split's files in a folder; none for what may be a hub id.

    Files of a split are named as on the hub, such as `data/train-00000-of-00002.parquet`.
    """
    source, path = f"dataset.source = {redacted(config.source)!r}", user_path(config.source, "dataset.source")
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{source}: the suffix must be one of {', '.join(SUFFIXES)}")
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
    """Return the rows of files of one kind; raise ValueError with the place of what cannot be read."""
    if files[0].suffix in (".csv", ".tsv"):
        return typed_rows([row for path in files for row in _cells(path)])
    return _objects(files)


def _objects(files: Iterable[Path]) -> Iterator[Row]:
    for path in files:
        read = _parquet_rows if path.suffix == ".parquet" else _json_rows
        for index, row in enumerate(read(path)):
            if not isinstance(row, dict):
                raise ValueError(f"{path}, row {index}: a row must be an object, got {short(row)}")
            yield row


@contextmanager
def row_named(config: DatasetConfig, index: int) -> Iterator[None]:
    """Prefix a ValueError with the source and the row, counted from 0."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{config.source}, row {index}: {error}") from error


def _json_rows(path: Path) -> Iterable[Any]:
    text = _text(path)
    is_array = text.lstrip().startswith("[")
    parts = [text] if is_array else text.split("\n")
    rows: list[Any] = []
    for number, part in enumerate(parts, 1):
        try:
            rows += [json.loads(part, object_pairs_hook=_unique)] if part.strip() else []
        except RecursionError:
            raise ValueError(f"{path}, line {number}: nested too deeply") from None
        except ValueError as error:
            form = "a file holds one JSON object per line, or one array of objects"
            raise ValueError(f"{path}, line {number}: {error}; {form}") from None
    return rows[0] if is_array else rows


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = max(row, key=[name for name, _ in pairs].count)
        raise ValueError(f"an object has the key {twice!r} twice; keep one")
    return row


def typed_rows(rows: Sequence[dict[str, str]]) -> Iterable[Row]:
    """Convert rows of cells to rows of text, numbers and None, with one type per column (see `_typed`)."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _typed([row.get(name, "") for row in rows]) for name in names}
    return ({name: columns[name][index] for name in row} for index, row in enumerate(rows))


def _cells(path: Path) -> list[dict[str, str]]:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if path.suffix == ".tsv" else ","
    table = csv.reader(io.StringIO(_text(path), newline=""), strict=True, delimiter=delimiter)
    header: list[str] = []
    rows = []
    line = 1
    try:
        for fields in table:
            header = header or fields
            if fields and len(fields) != len(header):
                raise ValueError(
                    f"{path}, line {line}: {len(fields)} fields, but the header has {len(header)}: "
                    f"{short(fields)}; quote a field that holds a {delimiter!r}"
                )
            if fields:
                rows.append(dict(zip(header, fields, strict=True)))
            line = table.line_num + 1
    except csv.Error as error:
        rule = 'a field that begins with a quote (") ends with one, and doubles each quote in between'
        raise ValueError(f"{path}, line {line}: {error}; {rule}") from None
    if len(set(header)) < len(header):
        raise ValueError(f"{path}: the header names {max(header, key=header.count)!r} twice; rename one")
    return rows[1:]


def _typed(cells: Sequence[str]) -> list[Any]:
    """Convert a column to int, float or bool if `str` gives back each cell, else keep its text.

    An empty cell is None.
    """
    kinds: tuple[Callable[[str], Any], ...] = (int, float, {"True": True, "False": False}.get)
    for kind in kinds if not {"None", "nan", "inf", "-inf"} & {*cells} else ():  # these stay text
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
