"""Prompts in, completions out: the Engine protocol and what implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_fast.rollout.types import Completion, Engine, Sampling

if TYPE_CHECKING:
    from grpo_fast.config import RolloutConfig
    from grpo_fast.policy import Policy

__all__ = ["Completion", "Engine", "Sampling", "make_engine", "sampling_of"]


def sampling_of(config: RolloutConfig, seed: int | None = None) -> Sampling:
    """How a run's rollouts are drawn."""
    return Sampling(
        max_completion_length=config.max_completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=tuple(config.stop),
        seed=seed,
    )


def make_engine(config: RolloutConfig, policy: Policy) -> Engine:
    """The engine that `config.engine` names; `auto` takes the best one available.

    Raises:
        ValueError: `config.engine` names no engine.
    """
    if config.engine in ("auto", "transformers"):
        from grpo_fast.rollout.transformers import TransformersEngine

        return TransformersEngine(
            policy.model,
            policy.tokenizer,
            eos_ids=policy.eos_token_ids,
            max_batch_tokens=config.max_batch_tokens,
        )
    raise ValueError(f"rollout.engine = {config.engine!r} is not known; use 'auto' or 'transformers'")
