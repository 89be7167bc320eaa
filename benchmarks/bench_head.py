"""The LM head at a CPU's size, ours and every peer that runs here: `pytest benchmarks --benchmark-only`."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.accuracy import consult
from benchmarks.peers import Peer, Unsupported, all_peers
from benchmarks.problem import MODES, Outcome, Setting
from benchmarks.row_sources import Sources, make_problem

TOKENS, HIDDEN, VOCABULARY = 256, 128, 4096


@pytest.mark.parametrize("peer", all_peers(), ids=lambda peer: peer.name)
@pytest.mark.parametrize("mode", MODES)
def test_head(benchmark: BenchmarkFixture, peer: Peer, mode: str) -> None:
    setting = Setting("peaked", TOKENS, HIDDEN, VOCABULARY, mode, True, "float32")
    problem = make_problem(setting, Sources(), torch.device("cpu"), seed=0)
    try:
        run = peer.prepare(problem)
    except (ImportError, Unsupported) as reason:
        pytest.skip(f"{peer.name}: {reason}")

    def once() -> Outcome:
        problem.clear()
        with torch.set_grad_enabled(problem.backward):
            return run()

    accuracy = consult(problem).judge(problem, once())
    assert accuracy.acceptable, accuracy
    benchmark.group = setting.title
    benchmark.extra_info |= vars(accuracy)
    benchmark(once)
