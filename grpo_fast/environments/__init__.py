"""Completions of several turns: tools, environments, and what of them the model sees, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_fast.data.types import Prompt
from grpo_fast.environments.tools import Toolsets, load_toolsets
from grpo_fast.lookup import load_callable
from grpo_fast.rollout.types import (
    Collector,
    Completion,
    Engine,
    Rollout,
    RolloutObserver,
    Sampling,
    generate_rollout,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_fast.rollout.config import RolloutConfig

__all__ = ["Toolsets", "load_toolsets", "make_rollout"]


def make_rollout(
    config: RolloutConfig,
    toolsets: Toolsets | None,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
) -> Rollout:
    """How the run's prompts become completions.

    Raises:
        ValueError: tools with a chat template that cannot go on after calls.
    """
    if config.function is not None:
        return _function_rollout(config.function)
    if toolsets is None:
        return generate_rollout
    if toolsets.tasks is not None:
        from grpo_fast.environments.verifiers import VerifiersRollout

        return VerifiersRollout(toolsets.tasks, tokenizer, end_ids)
    from grpo_fast.environments.episodes import EpisodeRollout

    return EpisodeRollout(config, toolsets, tokenizer, end_ids)


def _function_rollout(path: str) -> Rollout:
    """The `Rollout` of `rollout.function`: called with the engine, each prompt n times, and the sampling.

    Raises:
        ValueError: the path leads to no function; a rollout, that the function returns something else than a
            completion for each prompt.
    """
    function = load_callable(path, "rollout.function")

    def rollout(
        engine: Engine,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        *,
        observer: RolloutObserver | None = None,
    ) -> list[list[Completion]]:
        asked = [prompt for prompt in prompts for _ in range(n)]
        found = function(engine, asked, sampling)
        if not isinstance(found, Sequence) or len(found) != len(asked):
            got = f"{len(found)} completions" if isinstance(found, Sequence) else f"a {type(found).__name__}"
            raise ValueError(
                f"rollout.function = {path!r} returned {got} for {len(asked)} prompts; return a list with "
                "one completion for each, in their order"
            )
        collector = Collector(len(prompts), n, observer)
        for place, completion in enumerate(found):
            if (problem := _problem(completion, sampling)) is not None:
                raise ValueError(f"rollout.function = {path!r} returned, at place {place}, {problem}")
            collector.add(*divmod(place, n), completion)
        collector.report(int)
        return collector.groups()

    return rollout


def _problem(found: Any, sampling: Sampling) -> str | None:
    """What of a completion the trainer could not use."""
    if not isinstance(found, Completion):
        return f"a {type(found).__name__}; make a grpo_fast.rollout.Completion of it"
    size, limit = len(found.token_ids), sampling.max_completion_length
    if found.num_sampled == 0 or size > limit:
        own = f"{size} tokens, {found.num_sampled} of the model"
        return f"{own}; give at least one, and at most sampling.max_completion_length = {limit}"
    if found.logprobs is None and sampling.logprobs:
        return "no logprobs, which sampling.logprobs asks for"
    told = {"logprobs": found.logprobs, "sampled": found.episode and found.episode.sampled, **found.columns}
    for name, values in told.items():
        if isinstance(values, Sequence) and len(values) != size:
            return f"{len(values)} {name} for {size} tokens; give each token its own"
    return None
