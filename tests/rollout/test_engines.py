"""What every engine keeps: its draws are the policy's, its seeds, ends and failures behave alike.

And what only the engine on vLLM must survive, with the same one, for a process has one vLLM at a time.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_fast.policy import Policy, load_policy
from grpo_fast.policy.config import ModelConfig
from grpo_fast.rollout import Completion, Requests, Sampling, make_engine
from grpo_fast.rollout.config import RolloutConfig, VLLMConfig
from grpo_fast.rollout.vllm.sleep import SleepCycle

SAMPLING = Sampling(max_completion_length=24, seed=7)
LONG = tuple(3 + i % 26 for i in range(150))  # more than one block of vLLM's KV cache, so that it is reused
ENDS = {1, 5}  # of the saved model
ROUNDING = 1e-3  # float32 on both sides: some 1e-5 nats between two orders of summation
vllm_only = pytest.mark.parametrize("served", ["vllm"], indirect=True)


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


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def served(request, saved_model) -> Iterator[SimpleNamespace]:
    if request.param == "vllm":
        request.getfixturevalue("on_vllms_cpu")
        import vllm  # noqa: F401  a first import sets some variables of its own
    policy = load_policy(ModelConfig(path=str(saved_model()), dtype="float32", device="cpu"))
    config = RolloutConfig(engine=request.param, vllm=VLLMConfig(kv_cache_gib=0.05))
    before = state_of_the_process()
    with make_engine(config, policy, max_length=256) as engine:
        assert state_of_the_process() == before
        yield SimpleNamespace(engine=engine, policy=policy, config=config)
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


def completions(groups) -> list[Any]:
    return [completion for group in groups for completion in group]


@torch.no_grad()
def drawn_and_ranked(policy, prompt, completion, temperature=1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(C,) the policy's probabilities of the drawn tokens, and (C, V) of all, the largest first."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logits = policy.base_model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    probs = logits.softmax(-1)
    drawn = probs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return drawn, probs.sort(-1, descending=True).values


def test_logprobs_that_nobody_asks_for_change_no_token(engine, prompts):
    told, untold = (engine.generate(prompts, 3, replace(SAMPLING, logprobs=asked)) for asked in (True, False))

    unless_free = {} if engine.name == "transformers" else {"logprobs": None}
    assert untold == [[replace(completion, **unless_free) for completion in group] for group in told]


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
        drawn, ranked = drawn_and_ranked(policy, prompt, completion)
        assert (ranked[:, 0] / drawn).log().max() < ROUNDING  # ties are anybody's
    assert largest_difference(policy, prompts, groups) < ROUNDING


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}], ids=str)
def test_logprobs_are_those_of_the_restricted_distribution(engine, policy, prompts, limits):
    groups = engine.generate(prompts, 3, replace(SAMPLING, temperature=1.5, **limits))

    restricted = False
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            drawn, ranked = drawn_and_ranked(policy, prompt, completion, 1.5)
            kept = drawn / torch.tensor(completion.logprobs).exp()  # the mass of the support
            if "top_k" in limits:
                torch.testing.assert_close(kept, ranked[:, :3].sum(-1), rtol=ROUNDING, atol=0)
            elif "top_p" in limits:
                assert (kept > 0.6 - ROUNDING).all() and (kept < 0.6 + ranked[:, 0] + ROUNDING).all()
            else:
                assert (drawn > 0.3 * ranked[:, 0] - ROUNDING).all()
                assert (kept < 1 + ROUNDING).all()
            restricted |= bool((kept < 0.99).any())
    assert restricted


def test_a_seed_gives_its_completions_again_and_none_other_ones_and_the_process_stays_as_it_was(
    engine, prompts
):
    before = state_of_the_process()
    once, again, other, free, more = (
        engine.generate(prompts, 3, replace(SAMPLING, seed=seed)) for seed in (5, 5, 6, None, None)
    )

    assert once == again
    assert len({str(token_ids(groups)) for groups in (once, other, free, more)}) == 4
    assert state_of_the_process() == before


def test_completions_of_a_group_and_of_equal_prompts_are_drawn_apart(engine):
    first, second = token_ids(engine.generate([LONG, LONG], 4, replace(SAMPLING, temperature=1.5)))

    assert len({*first, *second}) > 4


def test_any_end_token_ends_a_completion_stays_in_it_and_is_no_truncation(engine, policy, prompts):
    groups = engine.generate(prompts, 16, replace(SAMPLING, max_completion_length=12, temperature=1.5))

    for completion in completions(groups):
        assert not ENDS & set(completion.token_ids[:-1])
        assert completion.truncated == (completion.token_ids[-1] not in ENDS)
        assert not completion.truncated or len(completion.token_ids) == 12
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.text == policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert {completion.token_ids[-1] for completion in completions(groups)} > ENDS


def test_a_stop_string_in_the_text_ends_a_completion_even_across_tokens_and_stays_there(
    engine, policy, prompts
):
    stops = ("z", "cf", "xy", "pad")  # the last one only in the name of a special token
    sampling = replace(SAMPLING, max_completion_length=40, temperature=2.0, stop=stops)

    stopped = 0
    for completion in completions(engine.generate(prompts, 16, sampling)):
        before = policy.tokenizer.decode(completion.token_ids[:-1], skip_special_tokens=True)
        assert not any(stop in before for stop in stops)
        ends = any(stop in completion.text for stop in stops)
        assert completion.truncated == (not ends and completion.token_ids[-1] not in ENDS)
        stopped += ends
    assert stopped


def test_an_observer_hears_of_each_group_once_and_of_the_progress_and_what_it_draws_stays_drawn(
    engine, prompts, monkeypatch
):
    monkeypatch.setattr("grpo_fast.rollout.types.REPORT_SECONDS", 0.0)
    heard: dict[int, list] = {}
    reports: list[tuple[int, int, int]] = []
    drawn: list[torch.Tensor] = []

    def group_done(index: int, group: list) -> None:
        heard[index] = [*heard.get(index, ()), *group]
        drawn.append(torch.rand(()))

    observer = SimpleNamespace(group_done=group_done, progress=lambda *report: reports.append(report))
    before = torch.get_rng_state()
    groups = engine.generate(prompts, 3, SAMPLING, observer=observer)

    assert [heard[index] for index in range(len(prompts))] == groups
    total, tokens = 3 * len(prompts), sum(len(c.token_ids) for c in completions(groups))
    assert reports[-1] == (tokens, total, total)
    assert reports == sorted(reports)
    assert 0 < reports[0][0] < tokens
    torch.set_rng_state(before)
    assert torch.equal(torch.stack([torch.rand(()) for _ in drawn]), torch.stack(drawn))


def is_idle(engine) -> bool:
    """Nothing is in flight, and every block of vLLM's KV cache is free."""
    vllm = getattr(engine, "_vllm", None)
    return vllm is None or (not vllm.has_unfinished_requests() and vllm.reset_prefix_cache())


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
def test_an_observer_that_fails_leaves_an_engine_that_goes_on(engine, prompts, error):
    def fail(*group: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        engine.generate(prompts, 3, SAMPLING, observer=SimpleNamespace(group_done=fail, progress=fail))

    assert is_idle(engine)
    assert engine.generate(prompts, 3, SAMPLING) == engine.generate(prompts, 3, SAMPLING)


@pytest.mark.parametrize("logprobs", [True, False])
def test_weights_that_are_not_numbers_are_reported(engine, policy, prompts, logprobs):
    norm = policy.base_model.model.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(torch.nan)
    try:
        with pytest.raises(FloatingPointError, match="diverged"):
            engine.generate(prompts, 1, replace(SAMPLING, logprobs=logprobs))
    finally:
        with torch.no_grad():
            norm.copy_(kept)
    assert len(engine.generate(prompts, 1, SAMPLING)) == len(prompts)


def test_asleep_it_refuses_to_generate_and_repeated_sleeps_and_wakes_do_nothing(engine, prompts):
    expected = engine.generate(prompts, 2, SAMPLING)
    engine.wake()
    engine.sleep()
    engine.sleep()
    with pytest.raises(RuntimeError, match=r"call wake\(\)"):
        engine.generate(prompts, 2, SAMPLING)
    engine.wake()
    engine.wake()

    assert engine.generate(prompts, 2, SAMPLING) == expected


@pytest.mark.parametrize("synced", [True, False])
def test_changed_weights_are_taken_over_and_nothing_cached_of_older_ones_is_used(
    engine, policy, prompts, shake, largest_difference, synced
):
    before = engine.generate(prompts, 3, SAMPLING)
    engine.sleep()
    shake(policy)
    if synced:
        engine.sync(policy)
    engine.wake()

    after = engine.generate(prompts, 3, SAMPLING)

    assert largest_difference(policy, prompts, before) > 10 * ROUNDING
    assert largest_difference(policy, prompts, after) < ROUNDING


@pytest.mark.parametrize(
    ("prompts", "n", "key"), [([(3,), ()], 1, r"prompts\[1\]"), ([(3,)], 0, "n = 0")], ids=str
)
def test_bad_input_is_named_and_no_input_gives_no_completions(engine, prompts, n, key):
    with pytest.raises(ValueError, match=key):
        engine.generate(prompts, n, SAMPLING)
    with pytest.raises(ValueError, match="another policy"):
        engine.sync(SimpleNamespace(model=None))

    assert engine.generate([], 4, SAMPLING) == []


@vllm_only
def test_logprobs_tell_of_logits_that_are_not_numbers(engine, policy, prompts):
    with torch.no_grad():
        engine._worker.get_model().model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="diverged"):
        engine.generate(prompts, 1, SAMPLING)
    engine.sync(policy)

    assert len(engine.generate(prompts, 1, SAMPLING)) == len(prompts)


@vllm_only
def test_more_prompts_than_vllm_prefills_at_once_are_drawn_with_seeds(
    engine, policy, rng, largest_difference
):
    prompts = torch.randint(3, 30, (70, 100), generator=rng).tolist()
    budget = engine._vllm.vllm_config.scheduler_config.max_num_batched_tokens
    assert budget < 70 * 100

    groups = engine.generate(prompts, 1, replace(SAMPLING, max_completion_length=2))

    assert largest_difference(policy, prompts, groups) < ROUNDING


@vllm_only
def test_a_ctrl_c_waits_for_the_step_and_leaves_nothing_in_flight(engine, prompts, monkeypatch):
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
            engine.generate(prompts, 3, SAMPLING)
    finally:
        signal.signal(signal.SIGINT, before)

    assert len(finished) == 4
    assert is_idle(engine)
    assert len(engine.generate(prompts, 2, SAMPLING)) == len(prompts)


@vllm_only
def test_a_model_that_fails_in_the_middle_leaves_nothing_in_flight(
    engine, policy, prompts, monkeypatch, largest_difference
):
    calls, runner = [], engine._worker.model_runner
    execute = runner.execute_model

    def fail_at_the_third(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory left")
        return execute(*args, **kwargs)

    monkeypatch.setattr(runner, "execute_model", fail_at_the_third)
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(prompts, 3, SAMPLING)

    assert is_idle(engine)
    assert largest_difference(policy, prompts, engine.generate(prompts, 3, SAMPLING)) < ROUNDING


@vllm_only
def test_a_sleep_behind_its_back_is_noticed_instead_of_waited_for(engine, prompts):
    engine._vllm.sleep(level=0)
    with pytest.raises(RuntimeError, match="behind the engine's back"):
        engine.generate(prompts, 2, SAMPLING)
    engine._vllm.wake_up(tags=["scheduling"])

    assert len(engine.generate(prompts, 2, SAMPLING)) == len(prompts)


@vllm_only
def test_level_two_drives_vllms_tags_one_after_the_other(engine, prompts):
    expected, vllm = engine.generate(prompts, 2, SAMPLING), engine._vllm
    cycle = SleepCycle(vllm, 2)

    cycle.sleep()
    cycle.wake_weights()
    assert vllm.is_sleeping()
    with pytest.raises(RuntimeError, match="kv_cache"):
        cycle.require_awake()
    cycle.weights_loaded()
    cycle.wake()

    cycle.require_awake()
    assert not vllm.is_sleeping()
    assert engine.generate(prompts, 2, SAMPLING) == expected


@vllm_only
def test_a_second_engine_is_refused_and_the_first_goes_on(served, prompts):
    with pytest.raises(RuntimeError, match="close it first"):
        make_engine(served.config, served.policy)

    assert len(served.engine.generate(prompts, 1, SAMPLING)) == len(prompts)


@vllm_only
def test_memory_is_told_by_part_and_bounds_what_a_prompt_may_ask_for(engine, policy):
    parts = engine.memory()

    weights = sum(parameter.numel() for parameter in policy.model.parameters()) * 4
    assert weights <= parts["weights"] < 1.5 * weights + 2**18  # padding of the vocabulary, rotary tables
    assert 0.9 < parts["kv_cache"] / (0.05 * 2**30) <= 1
    with pytest.raises(ValueError, match=r"250 tokens.*256.*max_model_length"):
        engine.generate([(3,) * 250], 1, SAMPLING)


def test_serving_answers_each_client_with_the_policys_draws_while_others_decode(
    engine, policy, prompts, seed, largest_difference
) -> None:
    requests = Requests(clients=len(prompts))
    turns: dict[int, list[tuple[tuple[int, ...], Completion]]] = {i: [] for i in range(len(prompts))}

    def client(number: int) -> None:  # three turns, each going on with what was drawn before
        ids = prompts[number]
        for turn in range(3):
            sampling = Sampling(max_completion_length=4 + number, seed=seed + 10 * number + turn)
            answer = requests.ask(ids, sampling).result(60)
            turns[number].append((ids, answer))
            ids = (*ids, *answer.token_ids, 7)
        requests.leave()

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    engine.serve(requests)
    for number, taken in turns.items():
        assert len(taken) == 3
        for ids, answer in taken:
            assert 1 <= len(answer.token_ids) <= 4 + number
            assert answer.truncated == (answer.token_ids[-1] not in ENDS)
            assert largest_difference(policy, [ids], [[answer]]) < ROUNDING


def test_a_request_without_room_fails_alone_and_an_error_of_a_client_ends_the_rollout(engine) -> None:
    requests = Requests(clients=2)
    good = requests.ask((3, 4), SAMPLING)
    bad = requests.ask((), SAMPLING)
    requests.leave()
    requests.leave()
    engine.serve(requests)
    assert good.result().token_ids
    with pytest.raises(ValueError, match="no tokens"):
        bad.result()

    failing = Requests(clients=1)
    failing.fail(LookupError("the environment is gone"))
    with pytest.raises(LookupError, match="is gone"):
        engine.serve(failing)
    assert len(engine.generate([(3, 4)], 1, SAMPLING)) == 1  # nothing stayed behind


def test_requests_are_drawn_by_their_seeds_and_without_one_each_token_apart(engine) -> None:
    def drawn(*seeds: int | None) -> list[tuple[int, ...]]:
        requests = Requests(clients=0)
        answers = [requests.ask(LONG, replace(SAMPLING, seed=seed, temperature=2.0)) for seed in seeds]
        engine.serve(requests)
        return [answer.result(0).token_ids for answer in answers]

    first, again, other, *free = drawn(5, 5, 6, None, None, None)
    assert first == again != other
    assert first == drawn(5)[0]
    assert len(set(free)) == 3 and len({token for ids in free for token in ids}) > 6  # else noise repeats
