"""Several ranks: their updates, their checkpoints, and what is saved and said where one of them fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from grpo_fast.cli import main
from grpo_fast.distributed.joining import RankError, meet, of_attempt
from grpo_fast.distributed.watch import Watch
from grpo_fast.distributed.world import started

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


def test_ranks_with_whole_weights_and_with_rows_of_them_update_them_as_one_rank_does(toy, tmp_path, seed):
    (tmp_path / "toy.json").write_text(json.dumps(toy | {"seed": seed}))
    work("update_worker.py", tmp_path, 2)


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


def test_any_number_of_ranks_goes_on_from_any_number_s_checkpoint_and_all_fail_where_one_does(tmp_path, seed):
    work("checkpoint_worker.py", tmp_path, seed)


def test_a_run_that_one_rank_ends_is_saved_by_all_unless_it_diverged_and_one_rank_goes_on(
    toy, playing_toy, tmp_path
):
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


GONE = r"rank {} \(process \d+ on host \S+, \d+ s at {} of step 3\) is gone; continue from .*--resume$"
RAISED = r"rank 1 \(process \d+ on host \S+\) failed at {} of step 3: ValueError: no such answer"
SILENT = r"rank 1 \(.* at the update of step 3\) has given no sign of life for 2 s \(raise distributed\.heart"
BEFORE = r"^RankError: rank {} \(process \d+ on host \S+\) failed before it joined: ValueError: no such key$"
ENDS = r"^grpo-fast: rank 0 \(.* at the update of step 3\) cannot go on and ends: "

# what ranks say, rank 0 alone unless others are named, and with which code each ends
CASES: dict[str, tuple[str | dict[int, str], list[int | None]]] = {
    "killed_while_others_work": ("^RankError: " + GONE.format(1, "the rollout"), [1, -9]),
    "killed_while_others_wait": ("^RankError: " + GONE.format(1, "the rollout"), [1, -9]),
    "killed_in_a_collective": ("^RankError: " + GONE.format(2, "the update"), [1, 1, -9]),
    "killed_with_a_child_that_holds_its_connections": (ENDS + GONE.format(1, "the update"), [1, -9]),
    "frozen": (ENDS + SILENT, [1, None]),
    "busy": (r"^\Z", [0, 0]),
    "busy_beside_another": (r"^\Z", [0, 0, 0]),
    "failed_before_it_joined": (BEFORE.format(1), [1, 1]),
    "led_by_one_that_failed": ({0: "^ValueError: no such key$", 1: BEFORE.format(0)}, [1, 1]),
    "never_there": (
        r"^grpo-fast: rank 0 \(.*\) has waited \d s for rank 1 to join\n(.*\n)*"
        r"RankError: rank 0 \(.*\) has waited 6 s for rank 1 to join: look there for why$",
        [1, 7],
    ),
    "failed_while_others_work": ("^RankError: " + RAISED.format("the rewards") + "$", [1, 1]),
    "agreed_by_three": ("^RankError: " + RAISED.format("the rewards") + "$", [1, 1, 1]),
    "failed_in_an_exchange_within": ("^RankError: " + RAISED.format("the gradient") + "$", [1, 1]),
    "failed_beside_a_collective": ("^RankError: " + RAISED.format("the update") + "; continue", [1, 1]),
    "failed_and_stays": (ENDS + RAISED.format("the update") + "; continue", [1, None]),
    "failed_outside": ("^RankError: " + RAISED.format("the end") + "$", [1, 1]),
    "hanging": (
        r"^RankError: rank 0 \(.* \d s at the rewards of step 3\) was left waiting by rank 1 \(.*, \d s at "
        "the rewards of step 3\\): .*Timed out waiting 1000ms.*; continue",
        [1, 1],
    ),
    "elsewhere": ("^RankError: rank 1 is at the rollout of step 3, not at the update of step 3$", [1, 1]),
    "forgiven": (r"^\Z", [0, 0]),
    "busy_alone": ({0: ENDS + SILENT, 1: "^RankError: " + SILENT}, [1, 1]),
    "started_again": (r"^\Z", [0, 0]),  # these last, for the kind of their store is that of all after them
}


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[int | None]]]:
    """Where what ranks said is, and the exit codes of all, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    codes = json.loads(work("watch_worker.py", folder, *CASES).splitlines()[-1])
    return {case: (folder / case, codes[case]) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_each_rank_ends_and_names_the_one_at_fault_and_its_place(happened, case: str):
    said, codes = CASES[case]
    place, found = happened[case]
    for rank, pattern in (said if isinstance(said, dict) else {0: said}).items():
        text = place.with_suffix(f".{rank}").read_text()
        assert re.search(pattern, text, re.MULTILINE), text
    assert found == codes


@pytest.mark.parametrize("name", ["cpu", "cuda:1"])
def test_each_ranks_device_is_named_and_exchanges_something_before_all_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, calls, summed = torch.device(name), {}, []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: calls.update(given))
    monkeypatch.setattr(dist, "new_group", lambda **given: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: summed.append(tensor.device))
    monkeypatch.setenv("WORLD_SIZE", "2")

    with FakeTensorMode():
        started(cast("Watch", None), dist.HashStore(), device, timedelta(seconds=1))

    assert calls["device_id"] == (device if device.type == "cuda" else None)
    assert summed == [device]


def test_a_rank_whose_configuration_is_wrong_tells_those_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": 2, "RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))

    assert main(["train", "quickstart", "no_such_key=1", f"output_dir={tmp_path}"]) == 2
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        RankError, match=r"^rank 1 .* failed before it joined: ConfigError: (.|\n)*no_such_key"
    ):
        meet(of_attempt(store), timedelta(seconds=1))
