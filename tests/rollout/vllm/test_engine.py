"""What only the engine on vLLM must survive, on vLLM's CPU build; `test_engines.py` has the rest."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_fast.policy import load_policy
from grpo_fast.policy.config import ModelConfig
from grpo_fast.rollout import Sampling, make_engine
from grpo_fast.rollout.config import RolloutConfig, VLLMConfig
from grpo_fast.rollout.vllm.sleep import SleepCycle

SAMPLING = Sampling(max_completion_length=24, seed=7)
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12), tuple(3 + i % 26 for i in range(150))]
CONFIG = RolloutConfig(engine="vllm", vllm=VLLMConfig(kv_cache_gib=0.05))


def state_of_the_process() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "python": random.getstate(),
        "set_num_threads": torch.set_num_threads,
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
        "environment": {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VLLM_", "_TORCHINDUCTOR_"))  # a compiler's note to itself
        },
    }


@pytest.fixture(scope="module")
def served(served_folder) -> Iterator[SimpleNamespace]:
    import vllm  # noqa: F401  a first import sets some variables of its own

    policy = load_policy(ModelConfig(path=str(served_folder()), dtype="float32", device="cpu"))
    before = state_of_the_process()
    with make_engine(CONFIG, policy, max_length=256) as engine:
        yield SimpleNamespace(engine=engine, policy=policy, before=before, after=state_of_the_process())


@pytest.fixture
def engine(served) -> Any:
    return served.engine


def is_idle(engine) -> bool:
    """Nothing is in flight, and every block of the KV cache is free."""
    return not engine._vllm.has_unfinished_requests() and engine._vllm.reset_prefix_cache()


def test_starting_vllm_and_generating_leave_the_process_as_it_was(served):
    assert {name for name in served.before if served.before[name] != served.after[name]} == set()
    before = state_of_the_process()
    served.engine.generate(PROMPTS, 2, SAMPLING)
    assert state_of_the_process() == before


def test_a_ctrl_c_waits_for_the_step_and_leaves_nothing_in_flight(engine, monkeypatch):
    before, step, finished = signal.getsignal(signal.SIGINT), engine._vllm.step, []
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted() -> Any:
        if len(finished) == 3:
            signal.raise_signal(signal.SIGINT)
        finished.append(step())
        return finished[-1]

    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine._vllm, "step", interrupted)
            engine.generate(PROMPTS, 3, SAMPLING)
    finally:
        signal.signal(signal.SIGINT, before)

    assert len(finished) == 4
    assert is_idle(engine)
    assert len(engine.generate(PROMPTS, 2, SAMPLING)) == len(PROMPTS)


@pytest.mark.parametrize("place", ["model", "observer"])
def test_a_failure_in_the_middle_leaves_nothing_in_flight(served, monkeypatch, largest_difference, place):
    engine, calls = served.engine, []
    runner = engine._running().worker.model_runner
    execute = runner.execute_model if place == "model" else lambda *args: None

    def fail_at_the_third(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory left")
        return execute(*args, **kwargs)

    observer = SimpleNamespace(group_done=fail_at_the_third, progress=lambda *report: None)
    if place == "model":
        monkeypatch.setattr(runner, "execute_model", fail_at_the_third)
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(PROMPTS, 3, SAMPLING, observer=observer if place == "observer" else None)

    assert is_idle(engine)
    assert largest_difference(served.policy, PROMPTS, engine.generate(PROMPTS, 3, SAMPLING)) < 1e-3


def test_a_sleep_behind_its_back_is_noticed_instead_of_waited_for(engine):
    engine._vllm.sleep(level=0)
    with pytest.raises(RuntimeError, match="behind the engine's back"):
        engine.generate(PROMPTS, 2, SAMPLING)
    engine._vllm.wake_up(tags=["scheduling"])

    assert len(engine.generate(PROMPTS, 2, SAMPLING)) == len(PROMPTS)


def test_level_two_drives_vllms_tags_one_after_the_other(engine):
    expected, vllm = engine.generate(PROMPTS, 2, SAMPLING), engine._vllm
    cycle = SleepCycle(vllm, 2)

    cycle.sleep()
    cycle.sleep()
    with pytest.raises(RuntimeError, match="dropped"):
        cycle.wake()
    cycle.wake_weights()
    cycle.wake_weights()
    assert vllm.is_sleeping()
    with pytest.raises(RuntimeError, match="KV cache asleep"):
        cycle.require_awake()
    cycle.weights_loaded()
    cycle.wake()
    cycle.wake()

    cycle.require_awake()
    assert not vllm.is_sleeping()
    assert engine.generate(PROMPTS, 2, SAMPLING) == expected


def test_a_second_engine_is_refused_and_the_first_goes_on(served):
    with pytest.raises(RuntimeError, match="close it first"):
        make_engine(CONFIG, served.policy)

    assert len(served.engine.generate(PROMPTS, 1, SAMPLING)) == len(PROMPTS)


def test_memory_is_told_by_part(served):
    parts = served.engine.memory()

    weights = sum(parameter.numel() for parameter in served.policy.model.parameters()) * 4
    assert weights <= parts["weights"] < 1.5 * weights + 2**18  # padding of the vocabulary, rotary tables
    assert 0.9 < parts["kv_cache"] / (0.05 * 2**30) <= 1


def test_a_prompt_without_room_for_its_completion_is_refused(engine):
    with pytest.raises(ValueError, match=r"250 tokens.*256.*max_model_length"):
        engine.generate([(3,) * 250], 1, SAMPLING)
