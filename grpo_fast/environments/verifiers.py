"""Rollouts on environments of the verifiers library: its loop asks the run's engine, through an endpoint.

The library's TrainClient renders prompts and parses answers, the endpoint draws from token ids and gives
token ids, and the library's trace keeps which of them the model wrote.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from grpo_fast.config.data import DatasetConfig
from grpo_fast.data.tasksets import COLUMN, environment_config, import_verifiers
from grpo_fast.data.types import Prompt
from grpo_fast.environments.endpoint import MODEL, OVERFLOW, Endpoint
from grpo_fast.environments.episodes import CoroutineRollout
from grpo_fast.environments.tools import Verifiers
from grpo_fast.rewards.calls import event_loop
from grpo_fast.rollout.requests import Requests
from grpo_fast.rollout.types import Completion, Episode, Sampling

if TYPE_CHECKING:
    import verifiers.v1 as vf
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def own_renderer(model: str, end_ids: Sequence[int]) -> dict[str, Any]:
    """The library's renderer of a model that it knows by name, else one of ours for any chat template."""
    from renderers.base import MODEL_RENDERER_MAP

    if model in MODEL_RENDERER_MAP:
        return {"name": MODEL_RENDERER_MAP[model]}
    path = "grpo_fast.environments.renderer:TurnRenderer"
    return {"name": "custom", "import_path": path, "end_ids": tuple(end_ids)}


class VerifiersRollout(CoroutineRollout):
    """The `Rollout` of an environment of the library.

    Of a trace with several branches, those of a harness that writes its context anew, the one with the most
    sampled tokens trains. What is left out is counted and told; so are turns that a renderer gave back in
    other tokens than were sampled, which end a branch, too.

    Args:
        dataset: the environment's; `max_prompt_length` bounds an episode's first prompt.
        end_ids: tokens at which the engine ends a turn.

    Raises:
        ValueError: an option that the library refuses.
    """

    def __init__(
        self, dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]
    ) -> None:
        assert dataset.max_prompt_length is not None
        self.retokenised = self.left_out = 0  # turns, and sampled tokens of other branches
        self._tokenizer = tokenizer
        self._saved = TemporaryDirectory(prefix="grpo-fast-tokenizer-")  # the library loads its own, by path
        tokenizer.save_pretrained(self._saved.name)
        self._endpoint = Endpoint(dataset.max_prompt_length, end_ids)
        self._environment = import_verifiers().load_environment(
            environment_config(dataset.source, dataset.options)
        )
        self._renderer = dataset.options.get("renderer") or own_renderer(tokenizer.name_or_path, end_ids)
        self._client: vf.TrainClientConfig | None = None  # once it is served
        self._over = asyncio.Event()  # keeps alive what waits for it
        weakref.finalize(self, event_loop("environments").call_soon_threadsafe, self._over.set)
        # It warns of each end of a conversation that the limit brings.
        quiet = logging.getLogger("verifiers.v1.interception.server")
        quiet.addFilter(lambda record: OVERFLOW not in record.getMessage())

    @property
    def described(self) -> str:
        """The parts of the library that are at work."""
        from verifiers.v1.configs.agent import agent_config_fields

        env = self._environment
        seats = (
            f"{name} by the harness {seat.harness.id if seat.harness else env.config.taskset.id} in "
            f"{seat.runtime.type}"
            for name, seat in agent_config_fields(env.config).items()
        )
        renderer = self._renderer.get("import_path") or self._renderer.get("name")
        return (
            f"verifiers {version('verifiers')}: {env.config.env_id} ({type(env).__name__}, "
            f"{type(env.taskset).__name__}), {', '.join(seats)}; TrainClient with the renderer {renderer}"
        )

    @asynccontextmanager
    async def opened(self, requests: Requests, sampling: Sampling) -> AsyncIterator[None]:
        before = self.retokenised, self.left_out
        await self._serve()
        with self._endpoint.opened(requests, sampling):
            yield
        if (self.retokenised, self.left_out) != before:
            logger.warning(
                "%d sampled tokens are not trained: their harness wrote the context anew, or (%d turns) the "
                "renderer wrote it in other tokens; dataset.options.renderer names another",
                *(self.left_out - before[1], self.retokenised - before[0]),
            )

    async def _serve(self) -> None:
        """Start the endpoint and the library's own servers, once."""
        if self._client is None:
            await self._endpoint.start()
            variable = "GRPO_FAST_API_KEY_" + self._endpoint.url.rpartition(":")[2]
            os.environ[variable] = self._endpoint.key  # the library's agents inherit no variable named so
            client = import_verifiers().TrainClientConfig(
                base_url=f"{self._endpoint.url}/v1",
                api_key_var=variable,
                renderer=self._renderer,
                renderer_model_name=self._saved.name,
            )
            env, ready, over = self._environment, asyncio.Event(), self._over

            async def serve() -> None:  # entered and left in one task, as the library's servers must be
                async with env.serving():
                    ready.set()
                    await over.wait()

            serving, is_ready = asyncio.ensure_future(serve()), asyncio.ensure_future(ready.wait())
            await asyncio.wait([serving, is_ready], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            self._client = client

    async def play(self, prompt: Prompt, requests: Requests, sampling: Sampling) -> Completion:
        """One episode of the library.

        Raises:
            RuntimeError: it ended before the model wrote anything.
            ValueError: an environment that trains several agents at once.
        """
        library, env = import_verifiers(), self._environment
        kind = type(env.taskset).task_type()
        task = kind(kind.data_type().model_validate(prompt.columns[COLUMN]), env.taskset.config.task)
        drawn = library.SamplingConfig.model_validate({"seed": sampling.seed})  # the endpoint knows the rest
        context = library.ModelContext(model=MODEL, client=self._client, sampling=drawn)
        return self._completion(await env.run_slot(env.slots(task)[0], context))

    def _completion(self, episode: vf.Episode) -> Completion:
        from verifiers.v1.dialects.chat import message_to_wire

        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        why = f"{errors[-1].type}: {errors[-1].message}" if errors else "nothing was asked of it"
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if len(traces) > 1:
            raise ValueError(
                f"{episode.env.id} trains {', '.join(trace.agent.name for trace in traces)} in one episode, "
                "and a completion is of one agent: choose another environment"
            )
        branches = [b for trace in traces for b in trace.branches if b.trainable and any(b.sampled_mask)]
        if not branches:
            raise RuntimeError(f"an episode of {episode.env.id} ended before its model wrote a word: {why}")
        if not episode.ok:
            logger.warning("an episode of %s failed and has no reward: %s", episode.env.id, why)
        trace, branch = traces[0], max(branches, key=lambda branch: sum(branch.sampled_mask))
        self._count_others(branch, branches)
        ids, mask = branch.token_ids, branch.sampled_mask
        first, end = mask.index(True), len(mask) - mask[::-1].index(True)
        told = next(i for i, node in enumerate(branch.nodes) if any(node.mask))
        messages = [message_to_wire(message) for message in branch.messages]
        reward, failed = trace.reward if episode.ok else None, trace.calls[-1].error
        overflown = failed is not None and OVERFLOW in failed.message
        return Completion(
            token_ids=tuple(ids[first:end]),
            logprobs=tuple(branch.logprobs[first:end]),
            text=str(self._tokenizer.decode(ids[first:end], skip_special_tokens=True)),
            truncated=trace.is_truncated or trace.is_timeout or overflown,
            episode=Episode(
                prompt=messages[:told],
                prompt_ids=tuple(ids[:first]),
                sampled=tuple(mask[first:end]),
                messages=tuple(messages[told:]),
                environment=Verifiers(trace, reward),
                tool_calls=sum(len(message.get("tool_calls", ())) for message in messages[told:]),
                environment_seconds=trace.timing.agent.harness.duration,
                reward=reward,
            ),
        )

    def _count_others(self, trained: vf.Branch, branches: Sequence[vf.Branch]) -> None:
        """Branches share what comes before they part; where they say the same after that, tokens differ."""
        from verifiers.v1.graph import message_hash

        known = {id(node) for node in trained.nodes}
        for branch in branches:
            self.left_out += sum(sum(node.mask) for node in branch.nodes if id(node) not in known)
            known |= {id(node) for node in branch.nodes}
            pairs = zip(branch.nodes, trained.nodes, strict=False)
            parted = next(((a, b) for a, b in pairs if a is not b), None)
            if parted is not None:
                a, b = (message_hash(node.message) for node in parted)
                self.retokenised += a == b
