"""Several ranks: their updates, their checkpoints, and what is saved and said where one of them fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def work(script: str, *arguments: object) -> str:
    """What a script of this folder prints."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_replicated_and_sharded_ranks_update_as_one_rank_does(toy, tmp_path, seed):
    (tmp_path / "toy.json").write_text(json.dumps(toy | {"seed": seed}))
    work("update_worker.py", tmp_path)


FAILED = r"^RankError: rank {} .* failed at the {}: {}"
DIVERGED = r"^Diverged: the run diverged after step 2: .*the logits hold NaN; .*--resume \S*step-00000001,"
OTHER = r"^ValueError: the {} of rank 1 is not that of rank 0: {} on rank 0; give all ranks the same"
SAID = {  # by rank 0, by rank 1
    "reward": (FAILED.format(1, "rollout of step 3", "ValueError: no such"), "^ValueError: no such answer$"),
    "diverged": (DIVERGED, DIVERGED),
    "apart": (r"^CheckpointError: output_dir = .*/apart on \d' is not the same folder",) * 2,
    "unread": (FAILED.format(1, "checkpoint", "DamagedCheckpoint: unr"), "^DamagedCheckpoint: unreadable$"),
    "configured": (OTHER.format("configuration", "max_steps is 5 there, and 4"),) * 2,
    "coded": (OTHER.format("code", r"own\.py is '\w+' there, and '\w+'"),) * 2,
    "rewarded": (OTHER.format("data", r"dataset\.source = 'rows\.jsonl', stage 1 is .*"),) * 2,
    "callback": ("^CallbackError: .*'mine'", FAILED.format(0, "record of step 2", "CallbackError: .*'mine'")),
}


def test_any_number_of_ranks_resumes_and_all_fail_to_save_where_one_does(tmp_path, seed):
    work("checkpoint_worker.py", tmp_path, seed)


def test_all_ranks_save_a_run_that_one_ends_unless_it_diverged(toy, playing_toy, tmp_path):
    (tmp_path / "toy.json").write_text(json.dumps(toy))
    asked = {"source": playing_toy["evaluation"]["dataset"]["source"], "size": 1}  # of one of the ranks
    (tmp_path / "playing.json").write_text(json.dumps(playing_toy | {"evaluation": {"dataset": asked}}))

    work("run_worker.py", tmp_path)

    for case, patterns in SAID.items():
        for rank, pattern in enumerate(patterns):
            assert re.search(pattern, (tmp_path / f"{case}.{rank}").read_text()), (case, rank)
    for case, steps in (("reward", [2, 4]), ("callback", [2]), ("diverged", [1, 2])):
        saved = sorted(path.name for path in (tmp_path / case / "checkpoints").iterdir())
        assert saved == [f"step-0000000{step}" for step in steps]
    metrics = (tmp_path / "reward" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [0, 1, 2, 3, 4]
    last = json.loads((tmp_path / "playing" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["turns/mean"] > 1 and 0 <= last["eval/reward"] <= 1


RAISED = r"rank 1 \(process \d+ on host \S+\) failed at the {} of step 3: ValueError: no such answer"
AT_UPDATE = r"rank {} \(process \d+ on host \S+, \d+ s at the update of step 3\)"
ENDS = rf"^grpo-fast: {AT_UPDATE.format(0)} cannot go on and ends: "

# what rank 0 says, and with which code each rank ends
CASES: dict[str, tuple[str, list[int | None]]] = {
    "killed_in_a_collective": (
        rf"^RankError: .*{AT_UPDATE.format(2)} does not answer: .*--resume",
        [1, 1, -9],
    ),
    "frozen": (rf"{ENDS}{AT_UPDATE.format(1)} has given no sign of life for 2 s", [1, None]),
    "never_there": (r"^RankError: rank 1 did not join within 6 s \(distributed.timeout\)", [1, 7]),
    "failed_while_others_work": (f"^RankError: {RAISED.format('rewards')}$", [1, 1, 1]),
    "failed_while_a_library_works": (f"^RankError: {RAISED.format('rewards')}$", [1, 1]),
    "failed_in_an_exchange_within": (f"^RankError: {RAISED.format('gradient')}$", [1, 1]),
    "failed_beside_a_collective": (f"^RankError: {RAISED.format('update')}; continue", [1, 1]),
    "failed_outside": (r"^RankError: rank 1 .* failed at the end of step 3: ValueError: no such", [1, 1]),
    "hanging": (r"^RankError: rank 1 \(.* at the rewards of step 3\) does not answer: .*Timed out", [1, 1]),
    "elsewhere": ("^RankError: rank 1 is at the rollout of step 3, not at the update of step 3$", [1, 1]),
    "forgiven": (r"^\Z", [0, 0]),
    "started_again": (r"^\Z", [0, 0]),  # the last, for the kind of its store is that of all after it
}


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[int | None]]]:
    """Where what ranks said is, and the exit codes of all, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    codes = json.loads(work("watch_worker.py", folder, *CASES).splitlines()[-1])
    return {case: (folder / case, codes[case]) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_each_rank_ends_and_names_the_one_at_fault_and_its_place(happened, case: str):
    pattern, codes = CASES[case]
    place, found = happened[case]
    text = place.with_suffix(".0").read_text()
    assert re.search(pattern, text, re.MULTILINE), text
    assert found == codes
