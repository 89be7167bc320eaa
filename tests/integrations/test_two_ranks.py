"""What adapters compute on two ranks, against one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from host_stubs import why_missing

HERE = Path(__file__).resolve().parent
HOSTS = ["huggingface", *(host for host in ("trl", "verl", "nemo_rl") if not why_missing(host))]


def test_two_ranks_give_the_gradients_of_one(model_folder, tmp_path, seed):
    hosts = random.Random(seed).sample(HOSTS, min(2, len(HOSTS)))
    done = subprocess.run(
        [sys.executable, str(HERE / "two_ranks.py"), str(tmp_path / "store"), str(model_folder), *hosts],
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
