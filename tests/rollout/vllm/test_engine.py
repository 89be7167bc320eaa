"""The engine on vLLM's CPU build: what it draws, what it says of it, and what it survives."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_fast.policy import Policy, load_policy
from grpo_fast.policy.config import ModelConfig
from grpo_fast.rollout import Sampling, make_engine
from grpo_fast.rollout.config import RolloutConfig
from grpo_fast.rollout.vllm.config import VLLMConfig
from grpo_fast.rollout.vllm.sleep import SleepCycle

SAMPLING = Sampling(max_completion_length=24, seed=7)
LONG = tuple(3 + i % 26 for i in range(150))  # more than one block of vLLM's KV cache, so that it is reused
CONFIG = VLLMConfig(kv_cache_gib=0.05)
# float32 on both sides: some 1e-5 nats of rounding between two orders of summation.
ROUNDING = 1e-3


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
    engine = make_engine(RolloutConfig(engine="vllm", vllm=CONFIG), policy, max_length=256)
    with engine:
        yield SimpleNamespace(engine=engine, policy=policy, before=before, after=state_of_the_process())
    assert not torch.distributed.is_initialized()


@pytest.fixture
def engine(served) -> Any:
    return served.engine


@pytest.fixture
def policy(served) -> Policy:
    return served.policy


@pytest.fixture
def prompts(rng) -> list[tuple[int, ...]]:
    lengths = torch.randint(1, 20, (3,), generator=rng).tolist()
    drawn = [tuple(torch.randint(3, 30, (length,), generator=rng).tolist()) for length in lengths]
    return [*drawn, LONG]


def token_ids(groups) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def is_idle(engine) -> bool:
    """Nothing is in flight, and every block of the KV cache is free."""
    return not engine._vllm.has_unfinished_requests() and engine._vllm.reset_prefix_cache()


def test_starting_vllm_leaves_the_process_as_it_was(served):
    assert {name for name in served.before if served.before[name] != served.after[name]} == set()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_policys_at_the_sampling_temperature(
    engine, policy, prompts, temperature, largest_difference
):
    groups = engine.generate(prompts, 3, replace(SAMPLING, temperature=temperature))

    assert [len(group) for group in groups] == [3] * len(prompts)
    assert largest_difference(policy, prompts, groups, temperature) < ROUNDING


def test_greedy_takes_the_most_likely_token_and_reports_it_at_temperature_one(
    engine, policy, prompts, largest_difference
):
    groups = engine.generate(prompts, 1, replace(SAMPLING, temperature=0.0))

    for prompt, (completion,) in zip(prompts, groups, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = policy.base_model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        drawn = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (logits.amax(-1) - drawn).max() < ROUNDING  # ties are anybody's
    assert largest_difference(policy, prompts, groups) < ROUNDING


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}], ids=str)
def test_logprobs_are_those_of_the_restricted_distribution(engine, policy, prompts, limits):
    groups = engine.generate(prompts, 3, replace(SAMPLING, temperature=1.5, **limits))

    restricted = False
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.no_grad():
                logits = policy.base_model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / 1.5
            probs = logits.softmax(-1)
            drawn = probs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            kept = drawn / torch.tensor(completion.logprobs).exp()  # the mass of the support
            ranked = probs.sort(-1, descending=True).values
            if "top_k" in limits:
                torch.testing.assert_close(kept, ranked[:, :3].sum(-1), rtol=ROUNDING, atol=0)
            elif "top_p" in limits:
                assert (kept > 0.6 - ROUNDING).all() and (kept < 0.6 + ranked[:, 0] + ROUNDING).all()
            else:
                assert (drawn > 0.3 * ranked[:, 0] - ROUNDING).all()
                assert (kept < 1 + ROUNDING).all()
            restricted |= bool((kept < 0.99).any())
    assert restricted


def test_the_same_seed_gives_the_same_completions_and_another_seed_others(engine, prompts):
    once, again, other = (engine.generate(prompts, 3, replace(SAMPLING, seed=seed)) for seed in (5, 5, 6))

    assert once == again
    assert token_ids(once) != token_ids(other)


def test_completions_of_a_group_and_of_equal_prompts_are_drawn_apart(engine):
    hot = replace(SAMPLING, temperature=1.5)
    first, second = token_ids(engine.generate([LONG, LONG], 4, hot))

    assert len({*first, *second}) > 4


def test_without_a_seed_two_calls_differ_and_the_global_state_is_left_alone(engine, prompts):
    before = state_of_the_process()

    calls = [token_ids(engine.generate(prompts, 3, replace(SAMPLING, seed=None))) for _ in range(2)]

    assert calls[0] != calls[1]
    assert state_of_the_process() == before


def test_an_end_token_ends_a_completion_stays_in_it_and_is_no_truncation(engine, policy, prompts):
    groups = engine.generate(prompts, 16, replace(SAMPLING, max_completion_length=40, temperature=1.5))

    completions = [completion for group in groups for completion in group]
    for completion in completions:
        assert 1 not in completion.token_ids[:-1]
        assert completion.truncated == (completion.token_ids[-1] != 1)
        assert not completion.truncated or len(completion.token_ids) == 40
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.text == policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert not all(completion.truncated for completion in completions)


def test_a_stop_string_ends_a_completion_and_stays_in_its_text(engine, policy, prompts):
    stops = ("a", "e", "xy")
    groups = engine.generate(
        prompts, 16, replace(SAMPLING, max_completion_length=40, temperature=2.0, stop=stops)
    )

    stopped = 0
    for completion in (completion for group in groups for completion in group):
        before = policy.tokenizer.decode(completion.token_ids[:-1], skip_special_tokens=True)
        assert not any(stop in before for stop in stops)
        ends = any(stop in completion.text for stop in stops)
        assert completion.truncated == (not ends and completion.token_ids[-1] != 1)
        stopped += ends
    assert stopped


class Recorder:
    def __init__(self) -> None:
        self.groups: dict[int, list] = {}
        self.reports: list[tuple[int, int, int]] = []

    def group_done(self, index, completions) -> None:
        assert index not in self.groups
        self.groups[index] = completions

    def progress(self, *report) -> None:
        self.reports.append(report)


def test_an_observer_hears_of_each_group_and_of_the_progress(engine, prompts, monkeypatch):
    monkeypatch.setattr("grpo_fast.rollout.collector.REPORT_SECONDS", 0.0)
    recorder = Recorder()

    groups = engine.generate(prompts, 3, SAMPLING, observer=recorder)

    assert [recorder.groups[index] for index in range(len(prompts))] == groups
    total = 3 * len(prompts)
    tokens = sum(len(ids) for group in token_ids(groups) for ids in group)
    assert recorder.reports[-1] == (tokens, total, total)
    assert recorder.reports == sorted(recorder.reports)
    assert 0 < recorder.reports[0][0] < tokens


def test_what_an_observer_draws_stays_drawn(engine, prompts):
    class Drawing(Recorder):
        def group_done(self, index, completions) -> None:
            torch.rand(1)

    before = torch.get_rng_state()
    engine.generate(prompts, 1, SAMPLING, observer=Drawing())

    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.rand(len(prompts))
    assert torch.equal(torch.get_rng_state(), after)


def test_an_observer_that_fails_leaves_nothing_in_flight(engine, prompts):
    class Failing(Recorder):
        def group_done(self, index, completions) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate(prompts, 3, SAMPLING, observer=Failing())

    assert is_idle(engine)
    assert engine.generate(prompts, 3, SAMPLING) == engine.generate(prompts, 3, SAMPLING)


def test_a_ctrl_c_waits_for_the_step_and_leaves_nothing_in_flight(engine, prompts, monkeypatch):
    before, step, finished = signal.getsignal(signal.SIGINT), engine._vllm.step, []
    monkeypatch.setattr(signal, "default_int_handler", signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted() -> Any:
        if len(finished) == 3:
            signal.raise_signal(signal.SIGINT)
        finished.append(step())
        return finished[-1]

    monkeypatch.setattr(engine._vllm, "step", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, 3, SAMPLING)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()

    assert len(finished) == 4
    assert is_idle(engine)
    assert len(engine.generate(prompts, 2, SAMPLING)) == len(prompts)


def test_a_model_out_of_memory_in_the_middle_leaves_nothing_in_flight(
    engine, policy, prompts, monkeypatch, largest_difference
):
    runner, calls = engine._running().worker.model_runner, []
    execute = runner.execute_model

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory left")
        return execute(*args, **kwargs)

    monkeypatch.setattr(runner, "execute_model", fail_once)
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(prompts, 3, SAMPLING)

    assert is_idle(engine)
    groups = engine.generate(prompts, 3, SAMPLING)
    assert largest_difference(policy, prompts, groups) < ROUNDING


def test_logits_that_are_not_numbers_are_reported(engine, policy, prompts):
    norm = policy.base_model.model.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(torch.nan)
    try:
        with pytest.raises(FloatingPointError, match="diverged"):
            engine.generate(prompts, 1, SAMPLING)
    finally:
        with torch.no_grad():
            norm.copy_(kept)
    assert is_idle(engine)


def test_asleep_it_refuses_to_generate_and_repeated_sleeps_and_wakes_do_nothing(engine, prompts):
    engine.wake()
    expected = engine.generate(prompts, 2, SAMPLING)
    engine.sleep()
    engine.sleep()
    with pytest.raises(RuntimeError, match=r"asleep; call wake\(\) first"):
        engine.generate(prompts, 2, SAMPLING)
    engine.wake()
    engine.wake()

    assert engine.generate(prompts, 2, SAMPLING) == expected


def test_a_sleep_behind_its_back_is_noticed_instead_of_waited_for(engine, prompts):
    engine._vllm.sleep(level=0)
    with pytest.raises(RuntimeError, match="behind the engine's back"):
        engine.generate(prompts, 2, SAMPLING)
    engine._vllm.wake_up(tags=["scheduling"])

    assert len(engine.generate(prompts, 2, SAMPLING)) == len(prompts)


def test_level_two_drives_vllms_tags_one_after_the_other(engine, prompts):
    expected, vllm = engine.generate(prompts, 2, SAMPLING), engine._vllm
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
    assert engine.generate(prompts, 2, SAMPLING) == expected


def test_changed_weights_are_taken_over_and_nothing_cached_of_older_ones_is_used(
    engine, policy, prompts, shake, largest_difference
):
    before = engine.generate(prompts, 3, SAMPLING)
    engine.sleep()
    shake(policy)
    engine.sync(policy)
    engine.wake()

    after = engine.generate(prompts, 3, SAMPLING)

    assert largest_difference(policy, prompts, before) > 10 * ROUNDING
    assert largest_difference(policy, prompts, after) < ROUNDING


def test_weights_that_nobody_synced_are_taken_over_too(engine, policy, prompts, shake, largest_difference):
    engine.generate(prompts, 3, SAMPLING)
    shake(policy)

    assert largest_difference(policy, prompts, engine.generate(prompts, 3, SAMPLING)) < ROUNDING


def test_another_policy_is_refused(engine):
    with pytest.raises(ValueError, match="another policy"):
        engine.sync(SimpleNamespace())


def test_a_second_engine_is_refused_and_the_first_goes_on(engine, policy, prompts):
    with pytest.raises(RuntimeError, match="close it first"):
        make_engine(RolloutConfig(engine="vllm", vllm=CONFIG), policy)

    assert len(engine.generate(prompts, 1, SAMPLING)) == len(prompts)


def test_memory_is_told_by_part(engine, policy):
    parts = engine.memory()

    weights = sum(parameter.numel() for parameter in policy.model.parameters()) * 4
    assert weights <= parts["weights"] < 1.5 * weights + 2**18  # padding of the vocabulary, rotary tables
    assert 0.9 < parts["kv_cache"] / (0.05 * 2**30) <= 1


@pytest.mark.parametrize(
    ("prompts", "n", "sampling", "message"),
    [
        ([(3,), ()], 1, SAMPLING, r"prompts\[1\] has no tokens"),
        ([(3,)], 0, SAMPLING, "n = 0"),
        ([(3,)], 1, replace(SAMPLING, temperature=-1.0), r"temperature = -1\.0"),
        ([(3,) * 250], 1, SAMPLING, r"250 tokens.*256.*max_model_length"),
    ],
    ids=["empty", "n", "temperature", "length"],
)
def test_bad_input_is_named(engine, prompts, n, sampling, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, n, sampling)


def test_no_prompts_give_no_completions(engine):
    assert engine.generate([], 4, SAMPLING) == []
