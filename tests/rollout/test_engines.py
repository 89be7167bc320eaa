"""Tests that all engines pass: log-probabilities, seeds, ends and failures.

Tests of vLLM only share the same engine, as a process has one vLLM at a time.
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

from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.rollout import RolloutConfig, VLLMConfig
from grpo_fast.policy import Policy, load_policy
from grpo_fast.rollout import Completion, Requests, Sampling, make_engine

SAMPLING = Sampling(max_completion_length=24, seed=7)
LONG = tuple(3 + i % 26 for i in range(150))  # more than one block of vLLM's KV cache, so that it is reused
ENDS = {1, 5}  # of the saved model
ROUNDING = 1e-3  # float32 on both sides: some 1e-5 nats between two orders of summation
vllm_only = pytest.mark.parametrize("served", ["vllm"], indirect=True)


def state_of_the_process() -> dict[str, Any]:
    own = ("VLLM_", "_TORCHINDUCTOR_")  # set by the compiler
    return {
        "random": (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()),
        "torch": (torch.set_num_threads, torch.get_num_threads(), torch.get_float32_matmul_precision()),
        "dtype": torch.get_default_dtype(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "environment": {name: value for name, value in os.environ.items() if not name.startswith(own)},
    }


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def served(request, saved_model) -> Iterator[SimpleNamespace]:
    if request.param == "vllm":
        request.getfixturevalue("on_vllms_cpu")
        import vllm  # noqa: F401  a first import sets some variables of its own
    policy = load_policy(ModelConfig(path=str(saved_model()), dtype="float32", device="cpu"))
    config = RolloutConfig(engine=request.param, vllm=VLLMConfig(kv_cache_gib=0.05, share_weights=False))
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


def completions(groups) -> list[Completion]:
    return [completion for group in groups for completion in group]


def is_idle(engine) -> bool:
    """Nothing is in flight, and every block of vLLM's KV cache is free."""
    vllm = getattr(engine, "_vllm", None)
    return vllm is None or (not vllm.has_unfinished_requests() and vllm.reset_prefix_cache())


@torch.no_grad()
def drawn_and_ranked(policy, prompt, completion, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (C,) the policy's probabilities of the sampled tokens, and (C, V) all, descending."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logits = policy.base_model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    probs = logits.softmax(-1)
    drawn = probs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return drawn, probs.sort(-1, descending=True).values


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}],
    ids=str,
)
@pytest.mark.drawn(6)
def test_logprobs_are_the_policys_in_the_distribution_that_is_sampled(engine, policy, prompts, options):
    temperature = options.get("temperature", 1.0)
    groups = engine.generate(prompts, 3, replace(SAMPLING, **options))

    assert [len(group) for group in groups] == [3] * len(prompts)
    support = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            drawn, ranked = drawn_and_ranked(policy, prompt, completion, temperature or 1.0)
            likeliest, mass = ranked[:, 0], drawn / torch.tensor(completion.logprobs).exp()
            if temperature == 0:
                assert (likeliest / drawn).log().max() < ROUNDING  # ties are anybody's
            if "top_k" in options:
                torch.testing.assert_close(mass, ranked[:, :3].sum(-1), rtol=ROUNDING, atol=0)
            elif "top_p" in options:
                assert (mass > 0.6 - ROUNDING).all() and (mass < 0.6 + likeliest + ROUNDING).all()
            elif "min_p" in options:
                assert (drawn > 0.3 * likeliest - ROUNDING).all() and (mass < 1 + ROUNDING).all()
            else:
                assert mass.log().abs().max() < ROUNDING
            support.append(mass)
    assert (torch.cat(support).min() < 0.99) == bool({"top_k", "top_p", "min_p"} & options.keys())


def test_seeds_decide_each_completion_and_the_process_stays_as_it_was(engine):
    before, warm = state_of_the_process(), replace(SAMPLING, temperature=1.5)
    once, again, *others = (
        engine.generate([LONG, LONG], 4, replace(warm, seed=seed)) for seed in (5, 5, 6, None, None)
    )

    assert once == again
    assert len({str(groups) for groups in (once, *others)}) == 4
    assert len({completion.token_ids for completion in completions(once)}) > 4
    assert state_of_the_process() == before


def test_any_end_token_ends_a_completion_stays_in_it_and_is_no_truncation(engine, policy, prompts):
    groups = engine.generate(prompts, 16, replace(SAMPLING, max_completion_length=12, temperature=1.5))

    for completion in completions(groups):
        assert not ENDS & set(completion.token_ids[:-1])
        assert completion.truncated == (completion.token_ids[-1] not in ENDS)
        assert not completion.truncated or len(completion.token_ids) == 12
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.text == policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert {completion.token_ids[-1] for completion in completions(groups)} > ENDS


def test_a_stop_string_ends_a_completion_even_across_tokens(engine, policy, prompts):
    stops = ("z", "cf", "xy", "<pad>")  # the last one a special token, which is cut from the text
    sampling = replace(SAMPLING, max_completion_length=40, temperature=2.0, stop=stops)

    stopped = 0
    for completion in completions(engine.generate(prompts, 16, sampling)):
        ids = completion.token_ids
        before, whole = (policy.tokenizer.decode(ids) for ids in (ids[:-1], ids))
        assert not any(stop in before for stop in stops)
        ends = any(stop in whole for stop in stops)
        assert completion.truncated == (not ends and completion.token_ids[-1] not in ENDS)
        stopped += ends
    assert stopped


def test_an_observer_gets_each_group_once_and_the_progress(engine, prompts, monkeypatch):
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
    assert reports[-1] == (tokens, total, total) and reports == sorted(reports)
    assert 0 < next(decoded for decoded, *_ in reports if decoded) < tokens
    torch.set_rng_state(before)
    assert torch.equal(torch.stack([torch.rand(()) for _ in drawn]), torch.stack(drawn))


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


@pytest.mark.parametrize("synced", [True, False])
def test_a_sleeping_engine_refuses_and_a_woken_one_has_the_new_weights(
    engine, policy, prompts, shake, largest_difference, synced
):
    before = engine.generate(prompts, 3, SAMPLING)
    engine.wake()
    engine.sleep()
    engine.sleep()
    with pytest.raises(RuntimeError, match=r"call wake\(\)"):
        engine.generate(prompts, 3, SAMPLING)
    engine.wake()
    engine.wake()
    assert engine.generate(prompts, 3, SAMPLING) == before
    engine.sleep()
    shake(policy)
    if synced:
        engine.sync(policy)
    engine.wake()

    after = engine.generate(prompts, 3, SAMPLING)

    assert largest_difference(policy, prompts, before) > 10 * ROUNDING
    assert largest_difference(policy, prompts, after) < ROUNDING


def test_bad_input_is_named_and_no_input_gives_no_completions(engine):
    with pytest.raises(ValueError, match=r"prompts\[1\]"):
        engine.generate([(3,), ()], 1, SAMPLING)
    with pytest.raises(ValueError, match="n = 0"):
        engine.generate([(3,)], 0, SAMPLING)
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
@pytest.mark.parametrize("failure", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_ctrl_c_or_a_failing_model_leaves_nothing_in_flight(
    engine, policy, prompts, monkeypatch, largest_difference, failure
):
    before, runner, finished = signal.getsignal(signal.SIGINT), engine._worker.model_runner, []
    execute, step = runner.execute_model, engine._vllm.step
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def fail_at_the_third(*args: Any, **kwargs: Any) -> Any:
        if len(finished) == 3:
            if failure is torch.OutOfMemoryError:
                raise failure("no memory left")
            signal.raise_signal(signal.SIGINT)
        return execute(*args, **kwargs)

    def counted() -> Any:
        outputs = step()
        finished.append(outputs)
        return outputs

    try:
        with monkeypatch.context() as patch, pytest.raises(failure):
            patch.setattr(runner, "execute_model", fail_at_the_third)
            patch.setattr(engine._vllm, "step", counted)
            engine.generate(prompts, 3, SAMPLING)
    finally:
        signal.signal(signal.SIGINT, before)

    assert len(finished) == (4 if failure is KeyboardInterrupt else 3)
    assert is_idle(engine)
    assert largest_difference(policy, prompts, engine.generate(prompts, 3, SAMPLING)) < ROUNDING


@vllm_only
def test_a_second_engine_is_refused_and_a_prompt_without_room_is_named(served, prompts):
    with pytest.raises(RuntimeError, match="close it first"):
        make_engine(served.config, served.policy)
    with pytest.raises(ValueError, match=r"250 tokens.*256.*max_model_length"):
        served.engine.generate([(3,) * 250], 1, SAMPLING)

    assert len(served.engine.generate(prompts, 1, SAMPLING)) == len(prompts)


def test_serving_answers_each_client_while_others_decode(
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

    for number in range(len(prompts)):
        threading.Thread(target=client, args=(number,), daemon=True).start()
    engine.serve(requests)
    for number, taken in turns.items():
        assert len(taken) == 3
        for ids, answer in taken:
            assert 1 <= len(answer.token_ids) <= 4 + number
            assert answer.truncated == (answer.token_ids[-1] not in ENDS)
            assert largest_difference(policy, [ids], [[answer]]) < ROUNDING


def test_a_bad_request_fails_alone_and_a_clients_error_ends_the_rollout(engine) -> None:
    requests = Requests(clients=0)
    good, bad = requests.ask((3, 4), SAMPLING), requests.ask((), SAMPLING)
    engine.serve(requests)
    assert good.result().token_ids
    with pytest.raises(ValueError, match="no tokens"):
        bad.result()

    failing = Requests(clients=1, on_progress=lambda tokens: failing.fail(LookupError("is gone")))
    failing.ask((3, 4), SAMPLING)
    with pytest.raises(LookupError, match="is gone"):
        engine.serve(failing)
    assert is_idle(engine)


def test_requests_are_drawn_by_their_seeds_and_without_one_each_token_apart(engine) -> None:
    def drawn(*seeds: int | None) -> list[tuple[int, ...]]:
        requests = Requests(clients=0)
        answers = [requests.ask(LONG, replace(SAMPLING, seed=seed, temperature=2.0)) for seed in seeds]
        engine.serve(requests)
        return [answer.result(0).token_ids for answer in answers]

    # Some end with their first token, and are the same by chance.
    first, again, *others = drawn(5, 5, 6, 7, 8, 9)
    assert first == again and len({first, *others}) > 2
    assert first == drawn(5)[0]
    free = drawn(*[None] * 9)
    assert len(set(free)) > 4 and len({token for ids in free for token in ids}) > 12  # else noise repeats
