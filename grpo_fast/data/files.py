"""Rows of local files, each with its place, so that a mistake can be found: JSON, CSV, Parquet."""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from grpo_fast.config.data import SUFFIXES, DatasetConfig
from grpo_fast.config.section import short

Row = dict[str, Any]
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def files_of(config: DatasetConfig) -> list[Path]:
    """The source itself, or what a folder has of the split, as datasets names it: `train.jsonl`,
    `data/train-00000-of-00002.parquet`; none for what may be a hub id."""
    source, path = f"dataset.source = {config.source!r}", Path(config.source).expanduser()
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
    held = sorted(file for folder in folders for file in folder.glob("*") if file.suffix in SUFFIXES)
    found = [file for file in held if re.split(r"[-.]", file.name)[0] == config.split]
    if len({file.suffix for file in found}) != 1:
        known = f"there are {short([file.name for file in held], limit=200)}" if held else "there are none"
        arrow = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
        saved = "; write what save_to_disk saved anew with to_parquet" if arrow else ""
        raise ValueError(
            f"{source} is a folder without files of one kind for the split {config.split!r}, as "
            f"{config.split}.jsonl or data/{config.split}-00000-of-00001.parquet; of {', '.join(SUFFIXES)} "
            f"{known}: name a file, or set dataset.split{saved}"
        )
    return found


def file_rows(files: Iterable[Path]) -> Iterator[tuple[str, Row]]:
    """Rows with their places, as `rows.jsonl, line 3`."""
    for path in files:
        for place, row in READERS[path.suffix](path):
            if not isinstance(row, dict):
                raise ValueError(f"{path}, {place}: a row is an object, {{column: value}}, got {short(row)}")
            yield f"{path}, {place}", row


def place_of(config: DatasetConfig, index: int) -> str:
    """Where row `index` stands, as `rows.jsonl, line 3`; looked up in the file."""
    files = files_of(config) if Path(config.source).expanduser().exists() else []
    place, _ = next(islice(file_rows(files), index, None), (f"{config.source}, row {index}", None))
    return place


@contextmanager
def row_named(config: DatasetConfig, index: int) -> Iterator[None]:
    """An error about row `index` begins with its place."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place_of(config, index)}: {error}") from error


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """JSON lines, or the objects of one array, whatever the suffix says."""
    with path.open("rb") as file:
        is_array = file.read(100).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if is_array:
        rows = _parsed("".join(_lines(path)), path, 1)
        yield from ((f"row {index}", row) for index, row in enumerate(rows))
        return
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield f"line {number}", _parsed(line, path, number)


def _parsed(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text.rstrip(), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        near = text.split("\n")[error.lineno - 1][max(0, error.colno - 40) : error.colno + 40]
        place = f"{path}, line {first_line + error.lineno - 1}, column {error.colno}"
        raise ValueError(
            f"{place}: {error.msg}, near {near!r}; rows are JSON, one object a line or one array of objects"
        ) from None
    except RecursionError:
        raise ValueError(f"{path}, line {first_line}: is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}, line {first_line}: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = max(row, key=[name for name, _ in pairs].count)
        raise ValueError(f"the key {twice!r} is given twice in one object; keep one")
    return row


def _csv_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Typed by pandas, which would fill rows that are short and shift the columns of those that are long."""
    csv.field_size_limit(sys.maxsize)
    table = csv.reader(_lines(path), strict=True)
    try:
        header = next(filter(None, table), [])
        if len(set(header)) < len(header):
            twice = max(header, key=header.count)
            raise ValueError(f"{path}: the header names {twice!r} twice; rename one")
        for fields in filter(None, table):
            if len(fields) != len(header):
                raise ValueError(
                    f"{path}, line {table.line_num}: {len(fields)} fields, but the header has {len(header)}: "
                    f"{short(fields)}; quote what holds commas"
                )
    except csv.Error as error:
        raise ValueError(f"{path}, line {table.line_num}: {error}") from None
    if header:
        from datasets import Dataset

        rows = Dataset.from_csv(str(path.resolve()), streaming=True)
        yield from ((f"row {index}", dict(row)) for index, row in enumerate(rows))


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    from pyarrow.parquet import ParquetFile

    try:
        rows = chain.from_iterable(batch.to_pylist() for batch in ParquetFile(path).iter_batches())
        yield from ((f"row {index}", row) for index, row in enumerate(rows))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


READERS = dict(zip(SUFFIXES, (_json_rows, _json_rows, _parquet_rows, _csv_rows), strict=True))


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                at = error.start
                raise ValueError(
                    f"{path}, line {number}, column {at + 1}: the byte {line[at]:#04x} is no UTF-8, near "
                    f"{line[max(0, at - 40) : at + 40]!r}; save the file as UTF-8"
                ) from None
