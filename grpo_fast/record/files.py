"""Lock a run's folder, append JSON lines that survive a kill, and replace files atomically."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from grpo_fast.config.record import LOCK_FILE

logger = logging.getLogger(__name__)


class RunInUse(RuntimeError):
    """Another process trains in the folder."""


@contextmanager
def locked_run_dir(run_dir: Path) -> Iterator[None]:
    """Make a run's folder and lock it against other processes, also of other hosts.

    The lock ends with its process. The file `run.lock` names the last holder.

    Raises:
        RunInUse: another process holds it; the message names host, process and start.
        OSError: the folder cannot be written to.
    """
    path, started = run_dir / LOCK_FILE, datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
    lock = FileLock(path)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            other = path.read_text().strip() or "another process"
            raise RunInUse(
                f"output_dir = {str(run_dir)!r} is in use: {other} trains there. Wait for its end or stop "
                "it, then continue with --resume; or choose another output_dir"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): a second process is not kept out", run_dir, error)
        path.write_text(f"process {os.getpid()} on host {socket.gethostname()}, started {started}\n")
        sync(path)  # so that other hosts see it
    except OSError as error:
        raise OSError(f"cannot write to {run_dir}: {error}; choose another output_dir") from error
    try:
        yield
    finally:
        lock.release()


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers find the old or the new content, also after a power cut."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_bytes(content)
        sync(unfinished)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot be written ({error.strerror})", str(path)) from error


def append_jsonl(path: Path, *records: Mapping[str, Any]) -> None:
    """Append records as lines; equal records give equal bytes. Readers ignore a torn last line.

    Raises:
        OSError: the disk is full or the file cannot be opened.
    """
    lines = []
    for record in records:  # NumPy scalars become numbers; NaN and infinity, which JSON lacks, become null
        plain = json.dumps(record, default=lambda scalar: scalar.item())
        finite = json.loads(plain, parse_constant=lambda _: None)
        lines.append(json.dumps(finite, ensure_ascii=False) + "\n")
    try:
        with path.open("ab") as file:
            # UTF-8 has no lone surrogates; as backslash escapes they are valid JSON and read back the same.
            file.write("".join(lines).encode("utf-8", "backslashreplace"))
    except OSError as error:
        message = f"cannot append to it ({error.strerror}); make room and resume the run"
        raise OSError(error.errno, message, str(path)) from error


def rewind_jsonl(path: Path, step: float = math.inf) -> None:
    """Create the file, or remove an unfinished last line and later steps; raise as `read_jsonl` does."""
    path.touch()
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        logger.warning("%s: its last line was torn and is lost", path)
    records = zip(lines, read_jsonl(path), strict=True)
    os.truncate(path, sum(len(line) + 1 for line, record in records if record.get("step", -1) <= step))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file without an unfinished last line; a missing file has none.

    Raises:
        ValueError: another line is not a JSON object.
    """
    records = []
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            records.append(dict(json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: no JSON object ({error}); repair or delete the line"
            ) from error
    return records
