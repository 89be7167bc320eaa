"""The files of a run's folder: JSON lines that survive a kill, and files that are replaced as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.yaml"
CHECKPOINTS_DIR = "checkpoints"
INPUTS_DIR = "inputs"  # rows and sources of objects that a Python program gave

Record = Mapping[str, Any]


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file at once: whoever reads it, also after a kill, finds the old content or the new one."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


class JsonlLog:
    """An append-only file of JSON objects, one a line.

    A line is on its way to the file system when `append` returns, so a killed process loses none.
    A last line that a kill or a full disk left half-written was never acknowledged: opening the
    file removes it. Python's shortest float representation makes values exact, so equal runs
    write equal bytes. JSON has no NaN or infinity: both become null.

    Raises:
        OSError: the file cannot be opened or appended to; what was there before stays intact.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  closed by close()
        self._size = path.read_bytes().rfind(b"\n") + 1
        self._file.truncate(self._size)

    @property
    def offset(self) -> int:
        """Bytes in whole lines. They are on the disk itself when this returns, as a checkpoint needs."""
        os.fsync(self._file.fileno())
        return self._size

    def append(self, *records: Record) -> None:
        """Write records as lines, all or none of them.

        Raises:
            OSError: the disk is full or the file is gone.
        """
        data = b"".join(map(_encode, records))
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(self._size)
            message = f"cannot append to it ({error.strerror}); make room and resume the run"
            raise OSError(error.errno, message, str(self.path)) from error
        self._size += len(data)

    def truncate(self, offset: int) -> None:
        """Cut back to an `offset` noted earlier.

        Raises:
            ValueError: the file has fewer bytes, or no line ends there: it is another run's.
        """
        self._file.seek(max(offset - 1, 0))
        ends_line = offset == 0 or self._file.read(1) == b"\n"
        if not 0 <= offset <= self._size or not ends_line:
            raise ValueError(
                f"offset = {offset} is not the end of a line of {self.path} ({self._size} bytes): the file "
                "does not belong to this checkpoint; resume in the run's own directory, or start afresh "
                "in an empty one"
            )
        self._file.truncate(offset)
        self._size = offset

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a half-written last line; an absent file has none.

    Raises:
        ValueError: a line, other than an unfinished last one, is not a JSON object.
    """
    if not path.exists():
        return []
    records = []
    *lines, _unfinished = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"got {line[:80]!r}")
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: no JSON object ({error}); repair or delete the line"
            ) from error
        records.append(record)
    return records


def _encode(record: Record) -> bytes:
    # NumPy's scalars become numbers, NaN and infinity null.
    plain = json.loads(
        json.dumps(record, default=lambda scalar: scalar.item()), parse_constant=lambda _: None
    )
    text = json.dumps(plain, ensure_ascii=False)
    # A lone surrogate has no UTF-8; as a backslash escape it is valid JSON and reads back the same.
    return text.encode("utf-8", "backslashreplace") + b"\n"
