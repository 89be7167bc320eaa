"""What several ranks save, and what of a run they save where one of them fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


FAILED = r"^RankError: rank {} .* failed at the {}: {}"
DIVERGED = r"^Diverged: the run diverged after step 2: .*the logits hold NaN; .*--resume \S*step-00000001,"
SAID = {  # by rank 0, by rank 1
    "reward": (FAILED.format(1, "rollout of step 3", "ValueError: no such"), "^ValueError: no such answer$"),
    "diverged": (DIVERGED, DIVERGED),
    "apart": (r"^CheckpointError: output_dir = .*/apart on \d' is not the same folder",) * 2,
    "callback": ("^CallbackError: .*'mine'", FAILED.format(0, "record of step 2", "CallbackError: .*'mine'")),
}


def work(script: str, *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


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
