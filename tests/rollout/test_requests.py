"""The queue between clients and an engine: nobody waits for what will not come."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from grpo_fast.rollout import Completion, Requests, Sampling
from grpo_fast.rollout.transformers import TransformersEngine

SAMPLING = Sampling(max_completion_length=100, seed=1)
DONE = Completion((3,), (0.0,), "a", False)


@pytest.fixture
def engine(model, tokenizer) -> TransformersEngine:
    return TransformersEngine(model, tokenizer, eos_ids=[99])  # never sampled


def test_a_ctrl_c_during_a_slow_tool_ends_the_rollout_for_all(engine):
    between, before = Requests(clients=2), signal.getsignal(signal.SIGINT)
    waiting = between.ask((3, 4), SAMPLING)  # the other client is in its tool
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.serve(between)
    finally:
        signal.signal(signal.SIGINT, before)

    with pytest.raises(RuntimeError, match="the rollout is over"):
        waiting.result(0)
    with pytest.raises(RuntimeError, match="the rollout is over"):
        between.ask((3, 4), SAMPLING)


def test_a_cancelled_request_is_not_sampled_and_a_late_answer_is_dropped():
    between = Requests(clients=2)
    given_up, wanted = between.ask((3,), SAMPLING), between.ask((4,), SAMPLING)
    given_up.cancel()
    (request,) = between.take("any")
    assert request.answer is wanted and not wanted.cancel()
    assert between.take("none") == []

    between.close()
    between.give(request, DONE)
    assert isinstance(wanted.exception(0), RuntimeError) and between.take("any") is None


def test_how_long_clients_take_does_not_change_what_is_sampled(engine, seed):
    """Otherwise a resumed run would sample other completions than an uninterrupted one."""
    pauses = random.Random(seed)

    def played(*, slow: bool) -> dict[int, list[Completion]]:
        between, said = Requests(clients=5), {number: [] for number in range(5)}

        def client(number: int) -> None:
            ids = (3, 4 + number)
            for turn in range(number % 3 + 1):  # some leave early
                time.sleep(pauses.random() / 30 if slow else 0)
                sampling = Sampling(max_completion_length=5 + number, seed=seed + 10 * number + turn)
                said[number].append(between.ask(ids, sampling).result(60))
                ids = (*ids, *said[number][-1].token_ids, 7)
            between.leave()

        for number in range(5):
            threading.Thread(target=client, args=(number,), daemon=True).start()
        engine.serve(between)
        return said

    assert played(slow=True) == played(slow=False)
