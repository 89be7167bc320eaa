"""The vocabulary split over two processes gives what one process gives."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("parallel_worker.py")
ROOT = WORKER.parents[2]


@pytest.fixture(scope="module")
def worker():
    spec = spec_from_file_location("parallel_worker", WORKER)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[int, list[torch.Tensor]]:
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, WORKER, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = {rank: load_file(folder / str(rank)) for rank in range(2)}
    return {rank: [tensors[str(i)] for i in range(len(tensors))] for rank, tensors in found.items()}


def test_outputs_and_losses_are_the_same_on_every_rank_as_on_one(two_ranks, worker):
    expected = worker.everything(*worker.batch(), None)

    for found in two_ranks.values():
        for name, a, b in zip(
            (*worker.OUTPUTS, "topk_ids", "topk_logprobs", "loss"), found, expected, strict=False
        ):
            torch.testing.assert_close(a, b.detach(), msg=name)


def test_each_rank_has_the_hidden_gradient_and_its_rows_of_the_others(two_ranks, worker):
    hidden, weight, bias = worker.everything(*worker.batch(), None)[-3:]

    for rank, found in two_ranks.items():
        rows = worker.rows_of(rank)
        for a, b in zip(found[-3:], (hidden, weight[rows], bias[rows]), strict=True):
            torch.testing.assert_close(a, b)
