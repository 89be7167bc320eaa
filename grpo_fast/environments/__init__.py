"""Roll out several turns with tools and environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_fast.environments.function import function_rollout
from grpo_fast.environments.tools import Toolsets, load_toolsets
from grpo_fast.rollout.types import Rollout, generate_rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_fast.config.rollout import RolloutConfig

__all__ = ["Toolsets", "load_toolsets", "make_rollout"]


def make_rollout(
    config: RolloutConfig,
    toolsets: Toolsets | None,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    chat_options: Mapping[str, Any] | None = None,
) -> Rollout:
    """Make the run's rollout; `chat_options` are `dataset.chat_template_kwargs`."""
    if config.function is not None:
        return function_rollout(config.function)
    if toolsets is None:
        return generate_rollout
    if toolsets.tasks is not None:
        from grpo_fast.environments.verifiers import VerifiersRollout

        return VerifiersRollout(toolsets.tasks, tokenizer, end_ids)
    from grpo_fast.environments.episodes import EpisodeRollout

    return EpisodeRollout(config, toolsets, tokenizer, end_ids, chat_options)
