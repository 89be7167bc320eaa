"""What each stage of a run trains with, made before the first step so that mistakes show at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grpo_fast.data import PromptDataset, PromptSampler, exclude_overlap, load_prompts
from grpo_fast.groups.sampler import make_sampler
from grpo_fast.groups.weights import AdaptiveWeights
from grpo_fast.rewards import RewardSet, load_rewards
from grpo_fast.stages import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Spaced so that no two stages, nor runs with neighbouring seeds, draw in one order.
SEEDS_PER_STAGE = 10**9


@dataclass(frozen=True)
class StageParts:
    """A stage, its rewards and its prompts. What it leaves as it was is the object of the stage before."""

    stage: Stage
    rewards: RewardSet
    prompts: PromptSampler
    adaptive_weights: AdaptiveWeights | None = None


def build_parts(
    stages: Sequence[Stage], tokenizer: PreTrainedTokenizerBase, held_out: PromptDataset | None
) -> tuple[StageParts, ...]:
    """The parts of every stage; questions of the held-out set are left out of the prompts.

    Raises:
        ValueError: settings that contradict the data, the rewards or the tokenizer.
        RewardError: a reward asks for a column that the data does not have.
    """
    parts: list[StageParts] = []
    for index, stage in enumerate(stages):
        before = parts[-1] if parts else None
        try:
            parts.append(_build(stage, index, before, tokenizer, held_out))
        except ValueError as error:
            raise (ValueError(f"stage {stage.name!r}: {error}") if stage.name else error) from error
    return tuple(parts)


def _build(
    stage: Stage,
    index: int,
    before: StageParts | None,
    tokenizer: PreTrainedTokenizerBase,
    held_out: PromptDataset | None,
) -> StageParts:
    config = stage.config
    parts = StageParts(
        stage,
        rewards=before.rewards if _same(stage, before, "rewards") else load_rewards(config.rewards),
        prompts=before.prompts if before else None,
        adaptive_weights=before.adaptive_weights if before else None,
    )
    if not _same(stage, before, "rewards", "adaptive_weights"):
        adaptive = config.adaptive_weights
        parts = replace(
            parts,
            adaptive_weights=adaptive
            and AdaptiveWeights(adaptive, parts.rewards.names, parts.rewards.weights),
        )
    if not _same(stage, before, "dataset", "groups", "curriculum", "prompts_per_step", *_deciding(stage)):
        if _same(stage, before, "dataset"):
            dataset = before.prompts.dataset
        else:
            dataset = load_prompts(config.dataset, tokenizer)
            dataset = dataset if held_out is None else exclude_overlap(dataset, held_out)
        seed = config.seed + index * SEEDS_PER_STAGE
        parts = replace(
            parts,
            prompts=make_sampler(
                dataset,
                config.prompts_per_step,
                config.groups,
                config.curriculum,
                parts.rewards.names,
                seed=seed,
            ),
        )
    parts.rewards.check_columns(list(parts.prompts.dataset[0].columns))
    return parts


def _deciding(stage: Stage) -> tuple[str, ...]:
    """Pass rates are of the rewards that they were measured by."""
    return ("rewards",) if stage.config.curriculum is not None else ()


def _same(stage: Stage, before: StageParts | None, *keys: str) -> bool:
    """Whether a stage has the settings of the one before."""
    return before is not None and all(
        getattr(stage.config, key) == getattr(before.stage.config, key) for key in keys
    )
