"""An engine behind HTTP, for libraries that bring their own loop: on this machine alone, and with a key."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_fast.rollout.requests import Requests
from grpo_fast.rollout.sampling import request_seed
from grpo_fast.rollout.types import Completion, Sampling

if TYPE_CHECKING:
    from aiohttp import web

MODEL = "policy"  # its name for clients
OVERFLOW = "maximum context length"  # words that agents' programs know too long a prompt by
SESSION = "X-Session-ID"  # a header: requests with one value are turns of one completion
# What else changes the distribution that is drawn from, and its value for no change.
NEUTRAL = {"n": 1, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_tokens": 0}


class Endpoint:
    """vLLM's `/inference/v1/generate`: token ids in, token ids and log-probabilities out.

    It listens on 127.0.0.1, at a port that the system gives, and answers who brings `key` as bearer token
    while it is `opened`. All is drawn as the run samples: other settings are refused, because what they draw
    would be learnt from as if the run's had.

    Args:
        max_prompt_length: tokens of the first prompt of a session.
        end_ids: tokens at which the engine ends a turn; requests may name these to stop at, and no others.
    """

    def __init__(self, max_prompt_length: int, end_ids: Sequence[int]) -> None:
        self.key = secrets.token_urlsafe(32)
        self.url = ""  # once started
        self._max_prompt_length = max_prompt_length
        self._end_ids = frozenset(end_ids)
        self._open: tuple[Requests, Sampling] | None = None
        self._first: dict[str, int] = {}  # tokens of the first prompt, by session

    async def start(self) -> None:
        """Listen, in the running loop.

        Raises:
            ImportError: aiohttp is not installed.
        """
        try:
            from aiohttp import web
        except ImportError as error:
            raise ImportError("an endpoint needs aiohttp: pip install 'grpo-fast[verifiers]'") from error

        async def answer(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.key.encode()):
                status, problem = 401, "unauthorized"
            else:
                try:
                    return web.json_response(await self._generate(request))
                except (KeyError, TypeError, ValueError) as error:
                    status, problem = 400, str(error)
                except (RuntimeError, asyncio.CancelledError) as error:
                    status, problem = 503, str(error) or "the rollout is over"
            return web.json_response({"error": {"message": problem}}, status=status)

        app = web.Application(client_max_size=2**30)
        app.router.add_post("/inference/v1/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    @contextmanager
    def opened(self, requests: Requests, sampling: Sampling) -> Iterator[None]:
        """Inside, what clients ask is asked of `requests`; `max_completion_length` bounds all that follows
        the first prompt of a session."""
        self._open = requests, sampling
        try:
            yield
        finally:
            self._open = None
            self._first.clear()

    async def _generate(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        drawn = await self._draw(request, body["token_ids"], body.get("sampling_params") or {})
        pairs = zip(drawn.token_ids, drawn.logprobs or (), strict=True)
        choice = {
            "index": 0,
            "token_ids": drawn.token_ids,
            "logprobs": {"content": [{"token": f"token_id:{id}", "logprob": value} for id, value in pairs]},
            "finish_reason": "length" if drawn.truncated else "stop",
        }
        return {"request_id": secrets.token_hex(8), "choices": [choice]}

    async def _draw(self, request: web.Request, ids: Sequence[int], wanted: Mapping[str, Any]) -> Completion:
        if self._open is None:
            raise RuntimeError("the engine sleeps: no rollout is on")
        requests, sampling = self._open
        if not ids or not all(type(token) is int for token in ids):
            raise ValueError("token_ids must be a list of at least one token")
        session = request.headers.get(SESSION)
        first = len(ids) if session is None else self._first.setdefault(session, len(ids))
        room = first + sampling.max_completion_length - len(ids)
        if room < 1 or first > self._max_prompt_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and the {OVERFLOW} is {self._max_prompt_length} for the "
                f"first (dataset.max_prompt_length), and {sampling.max_completion_length} for all that "
                "follows (rollout.max_completion_length)"
            )
        self._require_as_run(wanted, sampling)
        limit = wanted.get("max_tokens") or wanted.get("max_completion_tokens") or room
        seed = wanted.get("seed", sampling.seed)
        seed = None if seed is None else request_seed(seed, len(ids))  # turns must not draw alike
        asked = replace(sampling, max_completion_length=min(limit, room), seed=seed, logprobs=True)
        return await asyncio.wrap_future(requests.ask(ids, asked))

    def _require_as_run(self, wanted: Mapping[str, Any], sampling: Sampling) -> None:
        own = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        for name, value in {**NEUTRAL, **own}.items():
            asked = wanted.get(name)
            asked = 0 if name == "top_k" and asked == -1 else asked  # vLLM's word for all
            if asked is not None and asked != value:
                raise ValueError(f"{name} = {asked}, and the run draws with {value}; leave it out")
        if strange := {*(wanted.get("stop_token_ids") or ())} - self._end_ids:
            raise ValueError(
                f"stop_token_ids has {sorted(strange)}, and the model's generation_config.json has "
                f"eos_token_id = {sorted(self._end_ids)}: add them there"
            )
