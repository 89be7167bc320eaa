from __future__ import annotations

import os

import pytest

from benchmarks import host_memory

MEBIBYTE = 1 << 20


def test_the_peak_of_a_call_is_seen_although_it_is_given_back():
    def take() -> None:
        blocks = [os.urandom(MEBIBYTE) for _ in range(128)]
        blocks.clear()

    peak = host_memory.peak_of(take)
    if peak is None:
        pytest.skip("this system does not reset a process' peak")

    assert peak > 100 * MEBIBYTE  # of 128: pages that were resident before may be used again


def test_a_process_that_is_not_there_has_no_memory():
    assert host_memory.resident_bytes(2**22 + 1) is None  # beyond any process id of Linux
