from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_fast.distributed.world import World
from grpo_fast.policy import gradients
from grpo_fast.policy.out_of_memory import MicroBatchBudget

HERE = Path(__file__).resolve().parent


def test_sharded_weights_compute_generate_and_are_written_as_whole_ones(tmp_path, seed):
    paths = f"{os.environ['PYTHONPATH']}:{HERE.parent / 'distributed'}"
    worker = subprocess.run(
        [sys.executable, str(HERE / "shard_worker.py"), str(tmp_path), str(seed)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert worker.returncode == 0, worker.stdout + worker.stderr[-3000:]


def test_what_fsdp_cannot_divide_is_refused_by_name(load):
    ranks = World(0, 2)
    mixed, single, layerless, listed, named, weights = (load("qwen2") for _ in range(6))
    mixed.base_model.lm_head.to(torch.bfloat16)
    single.base_model.scale = torch.nn.Parameter(torch.ones(()))
    for layer in layerless.base_model.model.layers:
        layer.__class__ = torch.nn.Linear

    experts = {name: torch.nn.Bilinear(2, 2, 2) for name in "ab"}
    listed.base_model.model.layers[1].experts = torch.nn.ModuleList(experts.values())
    named.base_model.model.layers[1].experts = torch.nn.ModuleDict(experts)
    weights.base_model.model.layers[0].experts = torch.nn.ParameterList(map(torch.zeros, (2, 2)))
    refused = [(mixed, "bfloat16, torch.float32"), (single, "scale"), (layerless, "no layers")]
    in_list = "and others of its layer are experts in a list"
    refused += [(listed, f"Bilinear {in_list}"), (named, f"Bilinear {in_list}")]
    for policy, problem in [*refused, (weights, f"ParameterList {in_list}")]:
        with pytest.raises(ValueError, match=rf"distributed\.mode = 'shard'.*{problem}.*replicate"):
            policy.shard(ranks)


def test_a_gradient_that_one_rank_lacks_is_zero_there(monkeypatch):
    """As an expert's, of a list, to which no token of the rank went."""
    monkeypatch.setattr(World, "sum", lambda self, reached: reached + torch.tensor([1.0, 1.0, 0.0]))
    monkeypatch.setattr(gradients, "reduce_scatter", lambda tensors, world: tensors)
    parameters = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in ("here", "there", "nowhere")}
    parameters["here"].sum().backward()

    found = gradients.Gradients(parameters, World(0, 2)).summed()

    assert {name: gradient.sum() for name, gradient in found.items()} == {"here": 4, "there": 0}


def test_work_of_all_ranks_that_does_not_fit_is_no_ones_to_repeat():
    budget = MicroBatchBudget(unit="a sample", remedy="-", repeats=False)

    with pytest.raises(torch.OutOfMemoryError, match=r"96 tokens.*lower micro_batch_tokens.*CUDA out of mem"):
        for attempt, _ in budget.attempts(lambda: ([1], 96, 7)):
            with attempt:
                raise torch.OutOfMemoryError("CUDA out of memory")
