"""Whole updates on several ranks against one rank alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_ranks_with_whole_weights_and_with_rows_of_them_update_them_as_one_rank_does(toy, tmp_path, seed):
    (tmp_path / "toy.json").write_text(json.dumps(toy | {"seed": seed}))
    done = subprocess.run(
        [sys.executable, str(HERE / "update_worker.py"), str(tmp_path), "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
