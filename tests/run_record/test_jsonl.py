from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from grpo_fast.run_record.files import JsonlLog, read_jsonl


def write(path: Path, *records: dict) -> None:
    log = JsonlLog(path)
    log.append(*records)
    log.close()


def test_records_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    records = [
        {"step": 1, "text": "two\nlines, \u2028 and ü", "values": [0.1, 1 / 3, 1e-300, 7]},
        {"step": 2},
    ]

    write(path, *records)

    assert read_jsonl(path) == records


def test_numpy_scalars_become_numbers_and_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    write(
        path, {"a": np.float32(0.5), "b": np.int64(3), "c": {"d": [float("nan"), float("-inf")]}, "e": True}
    )

    assert path.read_text() == '{"a": 0.5, "b": 3, "c": {"d": [null, null]}, "e": true}\n'


def test_a_lone_surrogate_survives(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    write(path, {"text": "broken \udc80 byte"})

    assert read_jsonl(path) == [{"text": "broken \udc80 byte"}]


def test_opening_a_file_removes_its_half_written_last_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "re')

    write(path, {"step": 2})

    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_truncating_to_an_offset_forgets_what_came_after(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "log.jsonl")
    log.append({"step": 1})
    offset = log.offset
    log.append({"step": 2}, {"step": 3})

    log.truncate(offset)
    log.append({"step": 4})

    assert [record["step"] for record in read_jsonl(log.path)] == [1, 4]
    assert log.offset == log.path.stat().st_size
    log.close()


@pytest.mark.parametrize("offset", [-1, 5, 1000])
def test_an_offset_that_is_no_line_end_of_the_file_is_refused(tmp_path: Path, offset: int) -> None:
    log = JsonlLog(tmp_path / "log.jsonl")
    log.append({"step": 1})

    with pytest.raises(ValueError, match=rf"offset = {offset} .*log\.jsonl"):
        log.truncate(offset)

    assert read_jsonl(log.path) == [{"step": 1}]
    log.close()


def test_reading_leaves_out_an_unfinished_last_line_and_names_any_other_damage(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    path.write_bytes(b'{"step": 1}\n{"st')
    assert read_jsonl(path) == [{"step": 1}]

    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_jsonl(path)

    path.write_bytes(b"[1]\n")
    with pytest.raises(ValueError, match="line 1: expected a JSON object"):
        read_jsonl(path)


def test_an_absent_file_has_no_records(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "absent.jsonl") == []


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from grpo_fast.run_record.files import JsonlLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = JsonlLog(Path(sys.argv[1]))
log.append({"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
try:
    log.append({"step": 2, "text": "x" * 100})
except OSError as error:
    print(error)
log.append({"step": 3})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
def test_a_write_that_finds_no_room_leaves_whole_lines_and_says_which_file(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True, timeout=600
    )

    assert "cannot append" in done.stdout and str(path) in done.stdout
    assert [record["step"] for record in read_jsonl(path)] == [1, 3]


WRITER = """
import sys
from pathlib import Path
from grpo_fast.run_record.files import JsonlLog
log = JsonlLog(Path(sys.argv[1]))
log.truncate(int(sys.argv[2]))
for step in range(int(sys.argv[3]), 10**9):
    log.append({"step": step, "value": 1 / (step + 1), "text": "x" * 5000})
    if step == int(sys.argv[3]):
        print("writing", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_a_file_killed_at_random_points_and_taken_up_again_equals_one_written_in_one_go(
    tmp_path: Path,
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    path, offset, step = tmp_path / "log.jsonl", 0, 0

    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(offset), str(step)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        time.sleep(generator.uniform(0, 0.05))
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        lines = path.read_bytes().split(b"\n")[:-1]
        step = generator.randint(0, len(lines))  # a checkpoint somewhere in what was written
        offset = sum(len(line) + 1 for line in lines[:step])

    log = JsonlLog(path)
    log.truncate(offset)
    records = read_jsonl(path)
    expected = [{"step": i, "value": 1 / (i + 1), "text": "x" * 5000} for i in range(step)]
    assert records == expected
    assert path.read_bytes() == b"".join(json.dumps(record).encode() + b"\n" for record in expected)
    log.close()
