"""The vocabulary split over two processes gives what one process gives."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("parallel_worker.py")


def test_each_rank_has_the_outputs_of_one_and_its_rows_of_the_gradients(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, WORKER, tmp_path]
    worker = runpy.run_path(str(WORKER))
    *outputs, hidden, weight, bias = worker["everything"](*worker["batch"](), None)

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found, rows = load_file(tmp_path / str(rank)), worker["rows_of"](rank)
        for place, expected in enumerate((*outputs, hidden, weight[rows], bias[rows])):
            torch.testing.assert_close(found[str(place)], expected.detach())
        logprob, of_hidden = (exact.detach() for exact in worker["sure"](None))
        works, sure = logprob != 0, len(outputs) + 3
        assert logprob[works].abs().min() < 1e-10
        found_logprob, found_hidden = (found[str(sure + place)][works].double() for place in (0, 1))
        torch.testing.assert_close(found_logprob, logprob[works], rtol=2e-5, atol=0)
        error = (found_hidden - of_hidden[works]).norm(dim=1) / of_hidden[works].norm(dim=1)
        assert error.max() < 2e-5
