"""A run's folder: one holder, files whole at every moment, and JSON lines that a kill cannot spoil."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import resource
import signal
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from grpo_fast.record import files
from grpo_fast.record.files import RunInUse, append_jsonl, locked_run_dir, read_jsonl, rewind_jsonl

FORK = multiprocessing.get_context("fork")  # a process of its own without imports of its own


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch, error: Any):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"old and long")
    if error:
        monkeypatch.setattr(files.os, "replace", Mock(side_effect=error))
    with pytest.raises(error) if error else nullcontext():
        files.write_whole(path, b"new")
    assert path.read_bytes() == (b"old and long" if error else b"new")


def test_a_full_disk_leaves_whole_files_and_lines_and_is_named(tmp_path: Path, log: Path):
    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
        append_jsonl(log, {"step": 1})
        with pytest.raises(OSError, match=r"cannot append.*log\.jsonl"):
            append_jsonl(log, {"step": 2, "text": "x" * 100})
        with pytest.raises(OSError, match=r"cannot be written.*config\.yaml"):
            files.write_whole(tmp_path / "config.yaml", 100 * b"x")
        os._exit(7)

    process = FORK.Process(target=fill)
    process.start()
    process.join()
    assert process.exitcode == 7 and [*tmp_path.iterdir()] == [log]
    assert read_jsonl(log) == [{"step": 1}]


def test_records_are_read_as_they_were_written_with_null_for_nan(log: Path):
    text = {"text": "two\nlines, \u2028, ü and a broken \udc80 byte", "values": [0.1, 1 / 3, 1e-300, 7]}
    infinite = [float("nan"), float("-inf")]

    append_jsonl(log, text, {})
    append_jsonl(log, {"a": np.float32(0.5), "b": np.int64(3), "c": {"d": infinite}, "e": True})

    assert log.read_bytes().endswith(b'{"a": 0.5, "b": 3, "c": {"d": [null, null]}, "e": true}\n')
    assert read_jsonl(log)[:-1] == [text, {}]


@pytest.mark.parametrize("torn", [b'{"step": 4, "re', b"\0\0\0"])
def test_going_back_to_a_step_cuts_off_later_and_torn_lines(log: Path, torn: bytes, caplog):
    rewind_jsonl(log, 2)  # makes it
    append_jsonl(log, {"step": 1}, {"step": 2}, {"step": 2}, {"step": 3})
    log.write_bytes(log.read_bytes() + torn)
    assert [record["step"] for record in read_jsonl(log)] == [1, 2, 2, 3]
    rewind_jsonl(log)
    assert "log.jsonl: its last line was torn and is lost" in caplog.text
    append_jsonl(log, {"step": 4})
    assert [record["step"] for record in read_jsonl(log)] == [1, 2, 2, 3, 4]
    rewind_jsonl(log, 2)
    assert [record["step"] for record in read_jsonl(log)] == [1, 2, 2]


def test_a_damaged_line_is_named(log: Path):
    for damaged, line in ((b'{"step": 1}\n{"st\n{"step": 3}\n', "line 2"), (b"[1]\n", "line 1")):
        log.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"log\.jsonl, {line}: no JSON object"):
            read_jsonl(log)


def hold_with_a_worker(run_dir: Path, workers) -> None:
    with locked_run_dir(run_dir):
        if (worker := os.fork()) == 0:
            signal.pause()
        workers.put(worker)
        signal.pause()


def test_a_lock_names_its_holder_and_ends_with_it_despite_workers(tmp_path: Path):
    workers = FORK.Queue()
    holder = FORK.Process(target=hold_with_a_worker, args=(tmp_path, workers))
    holder.start()
    worker = workers.get(timeout=300)
    try:
        named = rf"process {holder.pid} on host {socket.gethostname()}, started \d{{4}}-\d\d-\d\d \d\d:"
        with pytest.raises(RunInUse, match=named), locked_run_dir(tmp_path):
            pass
        holder.kill()
        holder.join()
        with locked_run_dir(tmp_path):
            os.kill(worker, 0)  # is alive
    finally:
        holder.kill()
        os.kill(worker, signal.SIGKILL)


def test_a_disk_without_locks_is_used_and_an_unwritable_one_refused(tmp_path: Path, monkeypatch, caplog):
    unsupported = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=unsupported))
    with locked_run_dir(tmp_path):
        assert f"{tmp_path} cannot be locked" in caplog.text
    for path, method in ((tmp_path / "run.lock" / "run", "mkdir"), (tmp_path, "fsync")):
        if method == "fsync":
            monkeypatch.setattr(files.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "no room")))
        refused = pytest.raises(OSError, match=f"cannot write to {path}: .*another output_dir")
        with refused, locked_run_dir(path):
            pass
