"""Files of a run's folder: whole at every moment, and JSON lines that a kill cannot spoil."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_fast.run_record import files
from grpo_fast.run_record.files import JsonlLog, read_jsonl

FORK = multiprocessing.get_context("fork")  # a process of its own without imports of its own


@pytest.fixture
def log(tmp_path: Path) -> Iterator[JsonlLog]:
    log = JsonlLog(tmp_path / "log.jsonl")
    yield log
    log.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch, is_killed: bool):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"old and long")

    def killed(*_: Path) -> None:
        raise KeyboardInterrupt

    if is_killed:
        monkeypatch.setattr(files.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            files.write_whole(path, b"new")
    else:
        files.write_whole(path, b"new")
        assert list(tmp_path.iterdir()) == [path]

    assert path.read_bytes() == (b"old and long" if is_killed else b"new")


def test_records_are_read_back_as_they_were_written_whole_and_as_numbers_or_null(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "re')
    text = {"text": "two\nlines, \u2028, ü and a broken \udc80 byte", "values": [0.1, 1 / 3, 1e-300, 7]}
    infinite = [float("nan"), float("-inf")]

    log = JsonlLog(path)  # and the half-written line is gone
    log.append(text, {})
    log.append({"a": np.float32(0.5), "b": np.int64(3), "c": {"d": infinite}, "e": True})
    log.close()

    assert path.read_bytes().endswith(b'{"a": 0.5, "b": 3, "c": {"d": [null, null]}, "e": true}\n')
    assert read_jsonl(path)[:-1] == [{"step": 1}, text, {}]


def test_truncating_to_the_end_of_a_line_forgets_what_came_after(log: JsonlLog):
    log.append({"step": 1})
    offset = log.offset
    log.append({"step": 2}, {"step": 3})

    log.truncate(offset)
    log.append({"step": 4})

    assert [record["step"] for record in read_jsonl(log.path)] == [1, 4]
    assert log.offset == log.path.stat().st_size
    for wrong in (-1, 5, 1000):
        with pytest.raises(ValueError, match=rf"offset = {wrong} "):
            log.truncate(wrong)
    assert len(read_jsonl(log.path)) == 2
    log.truncate(0)
    assert read_jsonl(log.path) == []


def test_reading_leaves_out_an_unfinished_last_line_and_names_any_other_damage(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    assert read_jsonl(path) == []  # absent

    path.write_bytes(b'{"step": 1}\n{"st')
    assert read_jsonl(path) == [{"step": 1}]

    for damaged, line in ((b'{"step": 1}\n{"st\n{"step": 3}\n', "line 2"), (b"[1]\n", "line 1")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=line):
            read_jsonl(path)


def append_to_a_full_disk(path: Path, result: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log = JsonlLog(path)
    log.append({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
    try:
        log.append({"step": 2, "text": "x" * 100})
    except OSError as error:
        result.send(str(error))
    log.append({"step": 3})


def test_a_write_that_finds_no_room_leaves_whole_lines_and_says_which_file(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    receiver, sender = FORK.Pipe(duplex=False)

    writer = FORK.Process(target=append_to_a_full_disk, args=(path, sender))
    writer.start()
    writer.join()

    assert "cannot append" in (message := receiver.recv()) and str(path) in message
    assert [record["step"] for record in read_jsonl(path)] == [1, 3]


def record_of(step: int) -> dict[str, Any]:
    return {"step": step, "value": 1 / (step + 1), "text": "x" * 5000}


def keep_writing(path: Path, offset: int, first: int, sender: Any) -> None:
    log = JsonlLog(path)
    log.truncate(offset)
    for step in range(first, 10**9):
        log.append(record_of(step))
        if step == first:
            sender.send("writing")


def test_a_file_killed_at_random_points_and_taken_up_again_equals_one_written_in_one_go(
    tmp_path: Path, dice: random.Random
):
    path, offset, step = tmp_path / "log.jsonl", 0, 0

    for _ in range(5):
        receiver, sender = FORK.Pipe(duplex=False)
        writer = FORK.Process(target=keep_writing, args=(path, offset, step, sender))
        writer.start()
        assert receiver.recv() == "writing"
        time.sleep(dice.uniform(0, 0.05))
        writer.kill()
        writer.join()
        lines = path.read_bytes().split(b"\n")[:-1]
        step = dice.randint(0, len(lines))  # a checkpoint somewhere in what was written
        offset = sum(len(line) + 1 for line in lines[:step])

    log = JsonlLog(path)
    log.truncate(offset)
    expected = [record_of(i) for i in range(step)]
    assert read_jsonl(path) == expected
    assert path.read_bytes() == b"".join(json.dumps(record).encode() + b"\n" for record in expected)
    log.close()
