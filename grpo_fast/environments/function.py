"""Roll out by the user's function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_fast.config.lookup import load_callable
from grpo_fast.data.types import Prompt
from grpo_fast.rollout.types import Collector, Completion, Engine, Rollout, RolloutObserver, Sampling


def function_rollout(path: str) -> Rollout:
    """Make the `Rollout` of `rollout.function(engine, prompts, sampling)`, with each prompt n times.

    It raises ValueError unless the function returns a valid completion for each prompt.
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
            returned = f"rollout.function = {path!r} returned {got} for {len(asked)} prompts"
            raise ValueError(f"{returned}; return a list with one completion for each, in their order")
        collector = Collector(len(prompts), n, observer)
        for place, completion in enumerate(found):
            if (problem := _problem(completion, sampling)) is not None:
                raise ValueError(f"rollout.function = {path!r} returned, at place {place}, {problem}")
            collector.add(*divmod(place, n), completion)
        collector.report(lambda: 0)
        return collector.groups()

    return rollout


def _problem(found: Any, sampling: Sampling) -> str | None:
    """Describe what makes a completion unusable, or return None."""
    if not isinstance(found, Completion):
        return f"a {type(found).__name__}; return a grpo_fast.rollout.Completion"
    size, limit = len(found.token_ids), sampling.max_completion_length
    if found.num_sampled == 0 or size > limit:
        counts = f"{size} tokens, {found.num_sampled} of them sampled"
        return f"{counts}; return at least one, and at most sampling.max_completion_length = {limit}"
    if found.logprobs is None and sampling.logprobs:
        return "no logprobs, which sampling.logprobs asks for"
    sampled = found.episode and found.episode.sampled
    for name, values in {"logprobs": found.logprobs, "sampled": sampled, **found.columns}.items():
        if isinstance(values, Sequence) and len(values) != size:
            return f"{len(values)} {name} for {size} tokens; return one per token"
    return None
