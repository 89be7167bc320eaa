"""Roll out on environments of verifiers: the library runs the loop, and the run's engine samples."""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import verifiers.v1 as vf
from verifiers.v1.clients.client import Client
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import AssistantMessage, Response, ToolCall, TurnTokens

from grpo_fast.config.data import DatasetConfig
from grpo_fast.data.tasksets import COLUMN, environment_config
from grpo_fast.data.template import render
from grpo_fast.data.text import completion_texts
from grpo_fast.data.types import Prompt
from grpo_fast.environments.episodes import CoroutineRollout
from grpo_fast.environments.template import TurnTemplate
from grpo_fast.environments.tools import Verifiers
from grpo_fast.rewards.calls import event_loop
from grpo_fast.rollout.requests import Requests
from grpo_fast.rollout.sampling import derive_seed
from grpo_fast.rollout.types import Completion, Episode, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
OVERFLOW = "maximum context length"  # the library finds this text in the error of a prompt that is too long
SAMPLED = ("temperature", "top_p", "top_k", "min_p")  # an environment may set them to the run's values


@dataclass
class EngineClient(Client):
    """Answer the library's model calls by the run's engine; later turns continue the sampled tokens."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: Sequence[int]
    max_prompt: int  # tokens
    options: Mapping[str, Any]  # variables of the chat template
    requests: Requests
    sampling: Sampling
    first: dict[str, int] = field(default_factory=dict)  # by trace, tokens of the first prompt
    templates: dict[str, TurnTemplate] = field(default_factory=dict)  # by the schemas of tools

    async def get_response(
        self,
        dialect: Any,
        body: Any,
        sampling: Any,
        session_id: Any = None,
        turn: Any = None,
        headers: Any = None,
    ) -> Response:
        """Sample the answer to `turn`, as the library's `TrainClient` does."""
        if not isinstance(dialect, ChatDialect):
            raise ProviderError("training needs a harness that uses chat completions", status_code=400)
        tools = [tool_to_wire(tool) for tool in turn.tools]
        if (key := json.dumps(tools)) not in self.templates:
            self.templates[key] = TurnTemplate(self.tokenizer, self.end_ids, tools, self.options)
        template, tail = self.templates[key], [message_to_wire(message) for message in turn.tail]
        previous = turn.previous_renderer_token_ids()
        continues = previous is not None and {message["role"] for message in tail} <= {"tool", "user"}
        if continues:
            ids = [*previous[0], *previous[1]]
            ids += template.after(tail, cut_off=ids[-1] not in self.end_ids)
        else:
            messages = [message_to_wire(message) for message in turn.prompt]
            text = render(self.tokenizer, messages, tools=tools, options=self.options)
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        try:
            answer = await self._draw(session_id, ids, sampling.model_dump(exclude_none=True))
        except ValueError as error:
            raise ProviderError(str(error), status_code=400) from error
        message = template.parse(answer.token_ids)
        thoughts, _, text = str(message["content"]).rpartition("</think>")
        thoughts = message.get("reasoning_content") or thoughts.removeprefix("<think>").strip()
        calls = [
            ToolCall(
                id=f"call_{i}",
                name=call["function"]["name"],
                arguments=json.dumps(call["function"]["arguments"]),
            )
            for i, call in enumerate(message.get("tool_calls", ()))
        ]
        response = Response(
            id="",
            created=0,
            model=body["model"],
            message=AssistantMessage(
                content=text or None, reasoning_content=thoughts or None, tool_calls=calls or None
            ),
            finish_reason="length" if answer.truncated else "tool_calls" if calls else "stop",
            tokens=TurnTokens(
                prompt_ids=ids,
                completion_ids=list(answer.token_ids),
                completion_logprobs=list(answer.logprobs or ()),
                bridged=continues,
            ),
        )
        response.raw = serialize_completion(response, body["model"])
        return response

    async def _draw(self, trace: str, ids: Sequence[int], wanted: dict[str, Any]) -> Completion:
        """Sample with the run's settings, which the loss assumes."""
        sampling = self.sampling
        first = self.first.setdefault(trace, len(ids))
        room = first + sampling.max_completion_length - len(ids)
        if room < 1 or first > self.max_prompt:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; the {OVERFLOW} is dataset.max_prompt_length = "
                f"{self.max_prompt}, and rollout.max_completion_length = {sampling.max_completion_length}"
            )
        seed, limit = wanted.pop("seed", None), wanted.pop("max_tokens", room)
        if other := {k: v for k, v in wanted.items() if k not in SAMPLED or getattr(sampling, k) != v}:
            raise ValueError(f"the environment sets {other}, which differs from the run's sampling")
        seed = None if seed is None else derive_seed(seed, len(ids))  # another one for each turn
        own = replace(sampling, max_completion_length=min(limit, room), seed=seed, logprobs=True)
        return await asyncio.wrap_future(self.requests.ask(ids, own))


class VerifiersRollout(CoroutineRollout):
    """The `Rollout` of an environment of verifiers.

    A harness that rewrites its context makes several branches. The branch with the most sampled tokens
    trains, and a warning counts the tokens of the others.
    """

    def __init__(
        self, dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = end_ids, dataset.max_prompt_length or 0, dataset.chat_template_kwargs
        self._endpoint = vf.TrainClientConfig(base_url="http://grpo-fast", api_key_var="GRPO_FAST_NO_KEY")
        self._environment = vf.load_environment(environment_config(dataset))
        self.described = f"verifiers: {self._environment.config.env_id}"
        self._left_out = 0  # sampled tokens of branches that do not train
        self._serving: asyncio.Task[None] | None = None
        self._over = asyncio.Event()  # keeps the library's servers alive
        weakref.finalize(self, event_loop("environments").call_soon_threadsafe, self._over.set)
        # The server would warn of each conversation that reaches the limit.
        server = logging.getLogger("verifiers.v1.interception.server")
        server.addFilter(lambda record: OVERFLOW not in record.getMessage())

    @asynccontextmanager
    async def opened(self, requests: Requests, sampling: Sampling) -> AsyncIterator[None]:
        if self._serving is None:
            await self._serve()
        self._left_out = 0
        client = EngineClient(self._tokenizer, *self._limits, requests, sampling)
        self._environment._interception.clients[self._endpoint.model_dump_json()] = client
        yield
        if self._left_out:
            logger.warning("%d sampled tokens are not trained: a harness rewrote its context", self._left_out)

    async def _serve(self) -> None:
        """Start the library's servers, for the rest of the run."""
        environment, over, ready = self._environment, self._over, asyncio.Event()

        async def serve() -> None:  # the library's servers must start and stop in one task
            async with environment.serving():
                ready.set()
                await over.wait()

        self._serving, is_ready = asyncio.ensure_future(serve()), asyncio.ensure_future(ready.wait())
        await asyncio.wait([self._serving, is_ready], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()

    async def play(self, prompt: Prompt, requests: Requests, sampling: Sampling) -> Completion:
        """Return one episode's completion; raise RuntimeError if no token was sampled."""
        env, name = self._environment, self._environment.config.env_id
        kind = type(env.taskset).task_type()
        task = kind(kind.data_type().model_validate(prompt.columns[COLUMN]), env.taskset.config.task)
        seed = vf.SamplingConfig.model_validate({"seed": sampling.seed})  # the client knows the rest
        context = vf.ModelContext(model="policy", client=self._endpoint, sampling=seed)
        episode = await env.run_slot(env.slots(task)[0], context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        why = f"{errors[-1].type}: {errors[-1].message}" if errors else "it made no request"
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        branches = [b for trace in traces for b in trace.branches if b.trainable and any(b.sampled_mask)]
        if len(traces) > 1:
            raise ValueError(f"{name} trains several agents in one episode: choose another environment")
        if not branches:
            raise RuntimeError(f"an episode of {name} ended without a sampled token: {why}")
        if not episode.ok:
            logger.warning("an episode of %s failed and has no reward: %s", name, why)
        nodes = {id(node): sum(node.mask) for branch in branches for node in branch.nodes}
        branch = max(branches, key=lambda branch: sum(branch.sampled_mask))
        self._left_out += sum(nodes.values()) - sum(branch.sampled_mask)
        return self._completion(traces[0], branch, traces[0].reward if episode.ok else None)

    def _completion(self, trace: vf.Trace, branch: vf.Branch, reward: float | None) -> Completion:
        ids, mask, error = branch.token_ids, branch.sampled_mask, trace.calls[-1].error
        first, end = mask.index(True), len(mask) - mask[::-1].index(True)
        answered = next(i for i, node in enumerate(branch.nodes) if any(node.mask))
        messages = [message_to_wire(message) for message in branch.messages]
        overflown = error is not None and OVERFLOW in error.message
        episode = Episode(
            prompt=messages[:answered],
            prompt_ids=tuple(ids[:first]),
            sampled=tuple(mask[first:end]),
            messages=tuple(messages[answered:]),
            environment=Verifiers(trace, reward),
            tool_calls=sum(len(message.get("tool_calls", ())) for message in messages[answered:]),
            environment_seconds=trace.timing.agent.harness.duration,
            reward=reward,
        )
        return Completion(
            token_ids=tuple(ids[first:end]),
            logprobs=tuple(branch.logprobs[first:end]),
            text=completion_texts(self._tokenizer, [ids[first:end]], self._limits[0])[0],
            truncated=trace.is_truncated or trace.is_timeout or overflown,
            episode=episode,
        )
