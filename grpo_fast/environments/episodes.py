"""Roll out several turns: the model writes, its tool calls are answered, the model continues.

Each completion is a coroutine on an event loop, and the engine samples the turns that they request. So tools
of one completion run while others decode.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.config.section import short
from grpo_fast.data.render import Renderer
from grpo_fast.data.text import completion_texts
from grpo_fast.data.types import Message, Prompt
from grpo_fast.environments.conversation import Conversation, joined_text
from grpo_fast.environments.instances import Instances
from grpo_fast.environments.template import TurnTemplate
from grpo_fast.environments.tools import ENVIRONMENT_COLUMN, Toolsets
from grpo_fast.rewards.calls import event_loop
from grpo_fast.rollout.requests import Requests
from grpo_fast.rollout.sampling import seeded
from grpo_fast.rollout.types import Collector, Completion, Engine, RolloutObserver, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CoroutineRollout:
    """A `Rollout` with a coroutine for each completion, while the engine serves their requests."""

    async def play(self, prompt: Prompt, requests: Requests, sampling: Sampling) -> Completion:
        """Return one completion, whose turns are requested; `sampling.seed` belongs to it."""
        raise NotImplementedError

    @asynccontextmanager
    async def opened(self, requests: Requests, sampling: Sampling) -> AsyncIterator[None]:
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
        """Return `n` completions for each prompt.

        The engine serves even without prompts, because the engines of all ranks start together.
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

    Sampled tokens are kept as they are; results of calls are tokenized as the chat template writes them.
    `max_completion_length` limits both together, with the text that `reset` adds to the prompt. `end_ids` are
    the tokens at which the engine ends a turn. Raises ValueError if the chat template does not support tools.
    """

    def __init__(
        self,
        config: RolloutConfig,
        toolsets: Toolsets,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._toolsets = config, toolsets
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self._templates = {
            name: TurnTemplate(tokenizer, end_ids, toolset.schemas, chat_options)
            for name, toolset in toolsets.by_name.items()
        }
        like = DatasetConfig(source="", chat_template_kwargs=dict(chat_options or {}))
        self._renderer = Renderer(like, tokenizer, toolsets.schemas)

    def close(self) -> None:
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
        """Return one completion.

        Raises RuntimeError if an environment fails, ValueError if `reset` leaves no room for a completion.
        """
        toolset = self._toolsets.of(prompt.columns)
        template = self._templates[None if None in self._templates else prompt.columns[ENVIRONMENT_COLUMN]]
        talk = await self._begun(prompt, toolset.instances, sampling.max_completion_length)
        tools = toolset.calls(talk.environment)
        while True:
            ask = replace(seeded(sampling, talk.replies), max_completion_length=talk.left)
            answer = await asyncio.wrap_future(requests.ask((*talk.prompt_ids, *talk.token_ids), ask))
            message = template.parse(answer.token_ids)
            talk.reply(answer, message)
            calls = message.get("tool_calls", [])
            if answer.truncated or not calls or answer.token_ids[-1] != template.end_id:
                truncated = answer.truncated
                break
            if truncated := self._beyond(talk, len(calls)):
                break
            results: list[Message] = []
            for function in (call["function"] for call in calls):
                content = await talk.called(tools, function)
                results.append({"role": "tool", "name": function["name"], "content": content})
            ids = template.after(results)
            if truncated := len(ids) >= talk.left:
                break
            talk.answer(ids, results)
        if talk.given_up and toolset.instances is not None:
            toolset.instances.drop(talk.environment)
        (text,) = completion_texts(self._tokenizer, [talk.token_ids], self._end_ids)
        return await talk.ended(text, truncated=truncated)

    async def _begun(self, prompt: Prompt, instances: Instances | None, room: int) -> Conversation:
        """Start a conversation: reset its environment, and add the returned text to the prompt."""
        turns = self._renderer.turns(prompt.prompt)
        talk = Conversation(prompt, turns, prompt.token_ids, room, self._config.tool_timeout)
        if instances is None:
            return talk
        talk.environment = environment = instances.take()
        if environment is None:
            talk.environment = environment = await talk.required("made", instances.factory, {})
            instances.add(environment)
        row = {name: value for name, value in prompt.columns.items() if name != ENVIRONMENT_COLUMN}
        row["prompt"] = turns
        given = await talk.required("reset", environment.reset, row)
        if given is None:
            return talk
        what = f"{type(environment).__name__}.reset"
        if (said := joined_text(given, what)) is None:
            problem = f"{what} returned {short(given)}, a {type(given).__name__}, for row {prompt.index}"
            raise RuntimeError(f"{problem}: return text to append to the prompt, or None")
        *before, last = turns
        talk.turns = [*before, {**last, "content": f"{last['content']}{said}"}]
        text = self._renderer.text(talk.turns, prompt.columns)
        talk.prompt_ids = tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        longer = len(talk.prompt_ids) - len(prompt.token_ids)
        talk.room -= max(0, longer)
        if talk.room < 1:
            problem = f"{what} made the prompt {longer} tokens longer, which count as well; raise it"
            raise ValueError(f"rollout.max_completion_length = {room} leaves no room: {problem}")
        return talk

    def _beyond(self, talk: Conversation, calls: int) -> bool:
        turns, most = self._config.max_turns, self._config.max_tool_calls
        return (turns is not None and talk.replies >= turns) or (
            most is not None and talk.calls + calls > most
        )
