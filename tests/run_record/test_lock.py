"""The lock on a run's folder: one holder, named to the others, gone with its process."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
from pathlib import Path

import pytest

from grpo_fast.run_record.files import RunInUse, opened

FORK = multiprocessing.get_context("fork")


def hold(run_dir: Path, start, results, end) -> None:
    start.wait()
    try:
        with opened(run_dir):
            results.put("held")
            end.wait()
    except RunInUse as error:
        results.put(str(error))


def test_of_processes_that_start_at_one_instant_exactly_one_holds_the_folder(tmp_path: Path):
    start, end, results = FORK.Event(), FORK.Event(), FORK.Queue()
    processes = [FORK.Process(target=hold, args=(tmp_path, start, results, end)) for _ in range(6)]
    for process in processes:
        process.start()
    start.set()
    said = [results.get(timeout=60) for _ in processes]
    end.set()
    for process in processes:
        process.join()
    assert said.count("held") == 1
    assert all(str(tmp_path) in text and "--resume" in text for text in said if text != "held")


def hold_with_a_worker(run_dir: Path, workers) -> None:
    with opened(run_dir):
        if (worker := os.fork()) == 0:
            signal.pause()
        workers.put(worker)
        signal.pause()


def test_a_killed_holder_is_named_before_and_forgotten_after_though_its_worker_lives_on(tmp_path: Path):
    workers = FORK.Queue()
    holder = FORK.Process(target=hold_with_a_worker, args=(tmp_path, workers))
    holder.start()
    worker = workers.get(timeout=60)
    try:
        named = rf"process {holder.pid} on host {socket.gethostname()}, started \d{{4}}-\d\d-\d\d \d\d:"
        with pytest.raises(RunInUse, match=named), opened(tmp_path):
            pass
        holder.kill()
        holder.join()
        with opened(tmp_path):
            os.kill(worker, 0)  # is alive
    finally:
        os.kill(worker, signal.SIGKILL)


def test_the_folder_is_locked_within_a_process_too_and_free_after_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="of a run"), opened(tmp_path):
        with pytest.raises(RunInUse, match=f"process {os.getpid()} "), opened(tmp_path):
            pass
        raise ValueError("of a run")
    with opened(tmp_path):
        pass


def test_a_file_system_without_locks_is_told_and_trained_on(tmp_path: Path, monkeypatch, caplog):
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with opened(tmp_path):
        assert f"{tmp_path} cannot be locked" in caplog.text
