"""Completions of several turns: the model writes, its calls are answered, the model goes on.

One coroutine plays each completion. All run beside the engine, which draws whatever turns are asked for; so
calls of one completion are answered while others decode.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.lookup import choices, raised_at
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.config.section import short
from grpo_fast.data.render import Renderer
from grpo_fast.data.types import Message, Prompt
from grpo_fast.environments.instances import Instances
from grpo_fast.environments.template import TurnTemplate
from grpo_fast.environments.tools import ENVIRONMENT_COLUMN, Toolsets
from grpo_fast.rewards.calls import CallFailed, check_values, event_loop, in_thread
from grpo_fast.rollout.requests import Requests
from grpo_fast.rollout.sampling import seeded
from grpo_fast.rollout.types import Collector, Completion, Engine, Episode, RolloutObserver, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CallError(Exception):
    """A call that the model is told has failed, and why."""


class Overdue(CallError):
    """A call that is given up."""


@dataclass
class Play:
    """A completion while it is played."""

    prompt: Prompt
    turns: list[Message]  # of the prompt, with what the environment began it with
    prompt_ids: tuple[int, ...]
    room: int  # tokens that it may have
    environment: Any = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    experts: Any = None  # of the prompt and all tokens, as the last turn's answer tells
    sampled: list[bool] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    replies: int = 0  # of the model
    calls: int = 0
    failures: int = 0
    given_up: int = 0
    seconds: float = 0.0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, *, sampled: bool) -> None:
        """Tokens that follow."""
        self.token_ids += token_ids
        self.sampled += [sampled] * len(token_ids)
        if logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += logprobs

    @property
    def left(self) -> int:
        return self.room - len(self.token_ids)


class CoroutineRollout:
    """A `Rollout` each completion of which is a coroutine, on the event loop, while the engine serves."""

    async def play(self, prompt: Prompt, requests: Requests, sampling: Sampling) -> Completion:
        """One completion, whose turns are asked of `requests`; `sampling.seed` is its own."""
        raise NotImplementedError

    @asynccontextmanager
    async def opened(self, requests: Requests, sampling: Sampling) -> AsyncIterator[None]:
        """What is open while completions are played."""
        yield

    def __call__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        *,
        observer: RolloutObserver | None = None,
    ) -> list[list[Completion]]:
        """`n` completions for each prompt.

        Without prompts the engine serves, too: those of several ranks begin together.
        """
        collector = Collector(len(prompts), n, observer)
        requests = Requests(n * len(prompts), collector.progress)

        async def play_one(index: int, number: int) -> None:
            try:
                own = seeded(sampling, index, number)
                collector.add(index, number, await self.play(prompts[index], requests, own))
            finally:
                requests.leave()

        async def play_all() -> None:
            try:
                async with self.opened(requests, sampling):
                    pairs = [(index, number) for index in range(len(prompts)) for number in range(n)]
                    await asyncio.gather(*(play_one(*pair) for pair in pairs))
            except BaseException as error:
                requests.fail(error)
                raise

        playing = asyncio.run_coroutine_threadsafe(play_all(), event_loop("environments"))
        try:
            engine.serve(requests)
            playing.result()
        finally:
            requests.close()
            playing.cancel()
        return collector.groups()


class EpisodeRollout(CoroutineRollout):
    """The `Rollout` with tools and environments.

    What the model wrote stays as the ids that were sampled; what a call returned is tokenised as the chat
    template writes it. `max_completion_length` bounds all of it together, and what `reset` adds to a prompt.

    Args:
        toolsets: what may be called.
        tokenizer: the model's.
        end_ids: tokens at which the engine ends a turn.

    Raises:
        ValueError: a chat template that cannot go on after calls.
    """

    def __init__(
        self,
        config: RolloutConfig,
        toolsets: Toolsets,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
    ) -> None:
        self._config = config
        self._toolsets = toolsets
        self._tokenizer = tokenizer
        self._templates = {
            name: TurnTemplate(tokenizer, end_ids, toolset.schemas)
            for name, toolset in toolsets.by_name.items()
        }
        self._renderer = Renderer(DatasetConfig(source=""), tokenizer, toolsets.schemas)

    def close(self) -> None:
        """Close what the environments hold; nothing is played afterwards."""
        for toolset in self._toolsets.by_name.values():
            if toolset.instances is not None:
                toolset.instances.close()

    @asynccontextmanager
    async def opened(self, requests: Requests, sampling: Sampling) -> AsyncIterator[None]:
        for toolset in self._toolsets.by_name.values():
            if toolset.instances is not None:
                toolset.instances.begin()
        yield

    async def play(self, prompt: Prompt, requests: Requests, sampling: Sampling) -> Completion:
        """One completion, turn after turn.

        Raises:
            RuntimeError: an environment's `reset` or `get_reward` fails.
            ValueError: a prompt that leaves no room.
        """
        toolset = self._toolsets.of(prompt.columns)
        template = self._templates[None if None in self._templates else prompt.columns[ENVIRONMENT_COLUMN]]
        play = await self._begin(prompt, toolset.instances, sampling.max_completion_length)
        tools = toolset.calls(play.environment)
        while True:
            ask = replace(seeded(sampling, play.replies), max_completion_length=play.left)
            answer = await asyncio.wrap_future(requests.ask((*play.prompt_ids, *play.token_ids), ask))
            message = template.parse(answer.token_ids)
            play.add(answer.token_ids, answer.logprobs, sampled=True)
            play.experts = answer.experts
            play.messages.append(message)
            play.replies += 1
            calls = message.get("tool_calls", [])
            if answer.truncated or not calls or answer.token_ids[-1] != template.end_id:
                truncated = answer.truncated
                break
            if truncated := self._beyond(play, len(calls)):
                break
            answers: list[Message] = []
            for function in (call["function"] for call in calls):
                result = await self._answer(play, tools, function)
                answers.append({"role": "tool", "name": function["name"], "content": result})
            ids = template.after(answers)
            if truncated := len(ids) >= play.left:
                break
            play.add(ids, [0.0] * len(ids), sampled=False)
            play.messages += answers
        if play.given_up and toolset.instances is not None:
            toolset.instances.drop(play.environment)
        episode = Episode(
            prompt=play.turns,
            prompt_ids=play.prompt_ids,
            sampled=tuple(play.sampled),
            messages=tuple(play.messages),
            environment=play.environment,
            tool_calls=play.calls,
            tool_failures=play.failures,
            tools_given_up=play.given_up,
            environment_seconds=play.seconds,
            reward=await self._reward(play),
        )
        text = str(self._tokenizer.decode(play.token_ids, skip_special_tokens=True))
        logprobs = None if play.logprobs is None else tuple(play.logprobs)
        return Completion(tuple(play.token_ids), logprobs, text, truncated, episode, experts=play.experts)

    async def _begin(self, prompt: Prompt, instances: Instances | None, room: int) -> Play:
        """With an environment that is reset, the conversation that it begins, and its tokens."""
        play = Play(prompt, self._renderer.turns(prompt.prompt), prompt.token_ids, room)
        if instances is None:
            return play
        play.environment = environment = instances.take()
        if environment is None:
            play.environment = environment = await self._own_call(play, "made", instances.factory, {})
            instances.add(environment)
        row = {name: value for name, value in prompt.columns.items() if name != ENVIRONMENT_COLUMN}
        row["prompt"] = play.turns
        instances.check_reset(row)
        given = await self._own_call(play, "reset", environment.reset, row)
        if given is None:
            return play
        what = f"{type(environment).__name__}.reset"
        if (said := text_of(given, what)) is None:
            raise RuntimeError(
                f"{what} returned {short(given)}, a {type(given).__name__}, for row {prompt.index}: return "
                "the text that goes to the end of the prompt, or None"
            )
        *before, last = play.turns
        play.turns = [*before, {**last, "content": f"{last['content']}{said}"}]
        text = self._renderer.text(play.turns, prompt.columns)
        play.prompt_ids = tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        longer = len(play.prompt_ids) - len(prompt.token_ids)
        play.room -= max(0, longer)
        if play.room < 1:
            raise ValueError(
                f"rollout.max_completion_length = {room} bounds what an environment says, too, and "
                f"{what} made the prompt {longer} tokens longer; raise it"
            )
        return play

    def _beyond(self, play: Play, calls: int) -> bool:
        """Whether a limit ends the completion before these calls."""
        turns, most = self._config.max_turns, self._config.max_tool_calls
        return (turns is not None and play.replies >= turns) or (
            most is not None and play.calls + calls > most
        )

    async def _answer(
        self, play: Play, tools: Mapping[str, Callable[..., Any]], function: Mapping[str, Any]
    ) -> str:
        """What the model is told of a call: its result, or the error."""
        name = function["name"]
        play.calls += 1
        try:
            if name not in tools:
                raise CallError(f"there is no tool {name!r}: {choices(name, tools)}")
            given = await self._call(play, tools[name], function["arguments"])
        except (Exception, SystemExit) as error:  # a tool may raise anything
            play.failures += 1
            play.given_up += isinstance(error, Overdue)
            return str({"error": str(error)})  # as TRL says it
        text = text_of(given, f"the tool {name}")
        return str(given) if text is None else text

    async def _own_call(
        self, play: Play, what: str, function: Callable[..., Any], row: Mapping[str, Any]
    ) -> Any:
        """A call without which there is no completion; its errors end the rollout."""
        try:
            return await self._call(play, function, row)
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}{raised_at(error)}"
            raise RuntimeError(
                f"rollout.environment cannot be {what} for row {play.prompt.index} ({problem})"
            ) from error

    async def _reward(self, play: Play) -> float | None:
        """What the environment itself gives; None where it gives none."""
        if not hasattr(play.environment, "get_reward"):
            return None
        given = await self._own_call(play, "asked for its reward", play.environment.get_reward, {})
        try:
            return check_values([given], 1)[0]
        except CallFailed as failure:
            raise RuntimeError(f"{type(play.environment).__name__}.get_reward {failure}") from failure

    async def _call(self, play: Play, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """The function's result: of a coroutine on the loop, else of a thread.

        Raises:
            Overdue: not within `rollout.tool_timeout`; a thread is left to itself.
        """
        if inspect.iscoroutinefunction(function):
            work: asyncio.Future[Any] = asyncio.ensure_future(_without_exit(function(**arguments)))
        else:
            work = asyncio.wrap_future(in_thread(lambda: function(**arguments)))
        begun = time.monotonic()
        try:
            # Not wait_for, whose TimeoutError could be the function's own.
            await asyncio.wait([work], timeout=self._config.tool_timeout)
            if not work.done():
                raise Overdue(f"no answer within {self._config.tool_timeout:g} seconds")
            return work.result()
        finally:
            work.cancel()
            play.seconds += time.monotonic() - begun


def text_of(given: Any, what: str) -> str | None:
    """Text, or blocks of text joined; None of anything else.

    Args:
        what: gave it, for the error.

    Raises:
        RuntimeError: a block that is no text.
    """
    if isinstance(given, str):
        return given
    if not (given and isinstance(given, list) and all(isinstance(b, dict) and "type" in b for b in given)):
        return None
    for block in given:
        if block["type"] != "text" or not isinstance(block.get("text"), str):
            raise RuntimeError(
                f"{what} returned a block of type {block['type']!r}, and a completion is of text alone: "
                "return text, or blocks {'type': 'text', 'text': ...}"
            )
    return "".join(block["text"] for block in given)


async def _without_exit(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except SystemExit as error:  # it would end the event loop
        raise CallError(f"SystemExit: {error}") from error
