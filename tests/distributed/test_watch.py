"""What goes wrong on one of two ranks, or three: the others end, and say whose fault it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
GONE = r"rank {} \(process \d+ on host \S+, \d+ s at {} of step 3\) is gone; continue from .*--resume$"
FAILED = r"rank 1 \(process \d+ on host \S+\) failed at {} of step 3: ValueError: no such answer"
ENDS = r"^grpo-fast: rank 0 \(.* at the update of step 3\) cannot go on and ends: "

# what rank 0 says, and with which code each rank ends
CASES = {
    "killed_while_others_work": ("^RankError: " + GONE.format(1, "the rollout"), [1, -9]),
    "killed_while_others_wait": ("^RankError: " + GONE.format(1, "the rollout"), [1, -9]),
    "killed_in_a_collective": ("^RankError: " + GONE.format(1, "the update"), [1, -9]),
    "killed_with_a_child_that_holds_its_connections": (ENDS + GONE.format(1, "the update"), [1, -9]),
    "frozen": (ENDS + GONE.format(1, "the update"), [1, None]),
    "three": ("^RankError: " + GONE.format(2, "the update"), [1, 1, -9]),
    "failed_while_others_work": ("^RankError: " + FAILED.format("the rewards") + "$", [1, 1]),
    "agreed_by_three": ("^RankError: " + FAILED.format("the rewards") + "$", [1, 1, 1]),
    "failed_in_an_exchange_within": ("^RankError: " + FAILED.format("the gradient") + "$", [1, 1]),
    "failed_beside_a_collective": ("^RankError: " + FAILED.format("the update") + "; continue", [1, 1]),
    "failed_and_stays": (ENDS + FAILED.format("the update") + "; continue", [1, None]),
    "failed_outside": ("^RankError: " + FAILED.format("the end") + "$", [1, 1]),
    "hanging": (
        r"^RankError: rank 0 \(.* 1 s at the rewards of step 3\) was left waiting by rank 1 \(.*, 1 s at the "
        "rewards of step 3\\): .*Timed out waiting 1000ms.*; continue",
        [1, 1],
    ),
    "elsewhere": ("^RankError: rank 1 is at the rollout of step 3, not at the update of step 3$", [1, 1]),
    "forgiven": (r"^\Z", [0, 0]),
    "started_again": (r"^\Z", [0, 0]),  # the last, for its store is that of all after it
}


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[int | None]]]:
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(HERE / "watch_worker.py"), str(folder), *CASES],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    codes = json.loads(done.stdout.splitlines()[-1])
    return {case: ((folder / f"{case}.0").read_text(), codes[case]) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_each_rank_ends_and_names_the_one_at_fault_and_its_place(happened, case: str):
    said, codes = CASES[case]
    assert happened[case][1] == codes
    assert re.search(said, happened[case][0], re.MULTILINE), happened[case][0]
