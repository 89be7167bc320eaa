"""Collect the tokens and messages of a completion of several turns, and make its tool calls."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_fast.config.lookup import choices, raised_at
from grpo_fast.data.types import Message, Prompt
from grpo_fast.rewards.calls import CallFailed, check_scores, in_thread
from grpo_fast.rollout.types import Completion, Episode


class CallError(Exception):
    """A failed call; the model reads the message."""


class Overdue(CallError):
    """A call that took longer than `rollout.tool_timeout`."""


@dataclass
class Conversation:
    """A completion that is being sampled."""

    prompt: Prompt
    turns: list[Message]  # of the prompt, with the text that the environment's `reset` added
    prompt_ids: tuple[int, ...]
    room: int  # most tokens
    timeout: float | None  # seconds of a call
    environment: Any = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    experts: Any = None  # of the prompt and all tokens, from the last turn
    sampled: list[bool] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    replies: int = 0  # messages of the model
    calls: int = 0
    failures: int = 0
    given_up: int = 0  # calls that timed out
    seconds: float = 0.0  # spent in calls

    @property
    def left(self) -> int:
        return self.room - len(self.token_ids)

    def reply(self, answer: Completion, message: Message) -> None:
        self._add(answer.token_ids, answer.logprobs, sampled=True)
        self.experts = answer.experts
        self.messages.append(message)
        self.replies += 1

    def answer(self, token_ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Add the tokens between two turns of the model."""
        self._add(token_ids, [0.0] * len(token_ids), sampled=False)
        self.messages += messages

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, *, sampled: bool) -> None:
        self.token_ids += token_ids
        self.sampled += [sampled] * len(token_ids)
        if logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += logprobs

    async def ended(self, text: str, *, truncated: bool) -> Completion:
        episode = Episode(
            prompt=self.turns,
            prompt_ids=self.prompt_ids,
            sampled=tuple(self.sampled),
            messages=tuple(self.messages),
            environment=self.environment,
            tool_calls=self.calls,
            tool_failures=self.failures,
            tools_given_up=self.given_up,
            reward=await self._reward(),
            environment_seconds=self.seconds,
        )
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        return Completion(tuple(self.token_ids), logprobs, text, truncated, episode, experts=self.experts)

    async def called(self, tools: Mapping[str, Callable[..., Any]], function: Mapping[str, Any]) -> str:
        """Call a tool; return its result, or its error, as the model reads it."""
        name = function["name"]
        self.calls += 1
        try:
            if name not in tools:
                raise CallError(f"there is no tool {name!r}: {choices(name, tools)}")
            given = await self._call(tools[name], function["arguments"])
        except (Exception, SystemExit) as error:  # a tool may raise anything
            self.failures += 1
            self.given_up += isinstance(error, Overdue)
            return str({"error": str(error)})  # as in TRL
        text = joined_text(given, f"the tool {name}")
        return str(given) if text is None else text

    async def required(self, what: str, function: Callable[..., Any], row: Mapping[str, Any]) -> Any:
        """Call a method of the environment; raise RuntimeError with the row if it fails."""
        try:
            return await self._call(function, row)
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}{raised_at(error)}"
            named = f"rollout.environment cannot be {what} for row {self.prompt.index}"
            raise RuntimeError(f"{named} ({problem})") from error

    async def _reward(self) -> float | None:
        if not hasattr(self.environment, "get_reward"):
            return None
        given = await self.required("asked for its reward", self.environment.get_reward, {})
        try:
            return check_scores([given], 1)[0]
        except CallFailed as failure:
            raise RuntimeError(f"{type(self.environment).__name__}.get_reward {failure}") from failure

    async def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a coroutine on the loop, or a function in a thread; raise Overdue after the timeout."""
        if inspect.iscoroutinefunction(function):
            work: asyncio.Future[Any] = asyncio.ensure_future(_without_exit(function(**arguments)))
        else:
            work = asyncio.wrap_future(in_thread(lambda: function(**arguments)))
        begun = time.monotonic()
        try:
            # Not wait_for, whose TimeoutError could be the function's own.
            await asyncio.wait([work], timeout=self.timeout)
            if not work.done():
                raise Overdue(f"no answer within {self.timeout:g} seconds")
            return work.result()
        finally:
            work.cancel()
            self.seconds += time.monotonic() - begun


def joined_text(given: Any, what: str) -> str | None:
    """Return text, or blocks of text joined; None for any other value of `what`, such as a tool's result."""
    if isinstance(given, str):
        return given
    if not (given and isinstance(given, list) and all(isinstance(b, dict) and "type" in b for b in given)):
        return None
    for block in given:
        if block["type"] != "text" or not isinstance(block.get("text"), str):
            problem = f"{what} returned a block of type {block['type']!r}, but a completion is only text"
            raise RuntimeError(f"{problem}: return text, or blocks {{'type': 'text', 'text': ...}}")
    return "".join(block["text"] for block in given)


async def _without_exit(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except SystemExit as error:  # it would end the event loop
        raise CallError(f"SystemExit: {error}") from error
