"""The endpoint in front of an engine: who may ask, and that what it gives is what was drawn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from grpo_fast.environments.endpoint import SESSION, Endpoint
from grpo_fast.rollout import Completion, Requests, Sampling

aiohttp = pytest.importorskip("aiohttp")
SAMPLING = Sampling(8, temperature=0.7, seed=3)


def drawn(token_ids: tuple[int, ...], sampling: Sampling) -> Completion:
    """What the engine below answers: the prompt's last token again and again, as far as it may."""
    n = sampling.max_completion_length
    return Completion((token_ids[-1],) * n, tuple(-1 / (i + 3) for i in range(n)), "so", n == 8)


@pytest.fixture
def served() -> Iterator[tuple[Endpoint, Requests]]:
    """An endpoint with an engine behind it; `asyncio.run` of the test is the loop of its clients alone."""
    requests, loop = Requests(1), asyncio.new_event_loop()
    endpoint = Endpoint(10, [1, 2])
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(endpoint.start(), loop).result()

    def serve() -> None:
        while (taken := requests.take("any")) is not None:
            for request in taken:
                requests.give(request, drawn(request.token_ids, request.sampling))

    threading.Thread(target=serve, daemon=True).start()
    with endpoint.opened(requests, SAMPLING):
        yield endpoint, requests
    requests.close()


async def ask(
    endpoint: Endpoint, ids: list[int], *, key: str | None = None, session: str = "", **params: Any
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {endpoint.key if key is None else key}"}
    headers |= {SESSION: session} if session else {}
    body = {"model": "policy", "token_ids": ids, "sampling_params": params}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{endpoint.url}/inference/v1/generate", json=body) as answer,
    ):
        return answer.status, await answer.json()


def test_ids_and_logprobs_arrive_to_the_bit_for_two_clients_at_once(served):
    endpoint, _ = served

    async def both():
        return await asyncio.gather(ask(endpoint, [5, 6]), ask(endpoint, [7], max_tokens=3))

    for (status, answer), ids, n in zip(asyncio.run(both()), ((5, 6), (7,)), (8, 3), strict=True):
        expected = drawn(ids, replace(SAMPLING, max_completion_length=n))
        (choice,) = answer["choices"]
        entries = choice["logprobs"]["content"]
        assert status == 200 and choice["token_ids"] == list(expected.token_ids)
        assert [entry["logprob"] for entry in entries] == list(expected.logprobs)
        assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in expected.token_ids]
        assert choice["finish_reason"] == ("length" if n == 8 else "stop")


def test_it_listens_on_this_machine_alone_and_answers_only_with_the_key(served):
    endpoint, _ = served
    own = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert own == {"127.0.0.1"} and endpoint.url.startswith("http://127.0.0.1:")
    for key in ("", "x", endpoint.key[:-1]):
        assert asyncio.run(ask(endpoint, [5], key=key))[0] == 401


def test_turns_of_a_session_share_the_length_and_too_long_a_prompt_harms_nobody_else(served):
    endpoint, _ = served

    async def turns():
        first = await ask(endpoint, [5, 5], session="a", max_tokens=5)
        second = await ask(endpoint, [5] * 8, session="a")
        return (
            first,
            second,
            *(await asyncio.gather(ask(endpoint, [5] * 10, session="a"), ask(endpoint, [4]))),
        )

    (_, first), (_, second), (status, told), (other, _) = asyncio.run(turns())
    assert [len(answer["choices"][0]["token_ids"]) for answer in (first, second)] == [5, 2]
    assert status == 400 and "maximum context length" in told["error"]["message"] and other == 200


@pytest.mark.parametrize(
    "params", [{"temperature": 0.2}, {"top_k": 5}, {"n": 2}, {"stop_token_ids": [1, 9]}], ids=str
)
def test_what_the_run_would_not_draw_so_is_refused_with_its_name(served, params):
    status, answer = asyncio.run(ask(served[0], [5], **params))
    assert status == 400 and next(iter(params)) in answer["error"]["message"]


def test_settings_equal_to_the_runs_are_taken_and_a_sleeping_engine_says_so(served):
    endpoint, requests = served
    same = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "stop_token_ids": [2], "repetition_penalty": 1.0}
    assert asyncio.run(ask(endpoint, [5], **same))[0] == 200
    requests.close()
    assert asyncio.run(ask(endpoint, [5]))[0] == 503
