"""Samplers for groups of prompts, and which sampler a configuration asks for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_fast.data import Prompt, PromptDataset, PromptSampler
from grpo_fast.groups.config import CurriculumConfig, GroupConfig
from grpo_fast.groups.curriculum import DifficultySampler
from grpo_fast.groups.formation import Grouping, form_groups


class GroupSampler(PromptSampler):
    """Shuffled epochs in which the prompts of a group follow each other, so that a batch has them together.

    Every prompt still comes once an epoch. Where a batch ends within a group, its parts share what they can.
    """

    def __init__(self, dataset: Sequence[Prompt], batch_size: int, grouping: Grouping, seed: int = 0) -> None:
        super().__init__(dataset, batch_size, seed)
        self.grouping = grouping

    def shared(self, prompts: Sequence[Prompt]) -> list[int]:
        return self.grouping.shared(prompts)

    def metrics(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Share of prompts that share a baseline, prompts a baseline, the distance of those that share."""
        baselines = self.shared(prompts)
        sizes = Counter(baselines)
        metrics = {
            "groups/sharing": sum(size for size in sizes.values() if size > 1) / len(prompts),
            "groups/prompts_per_baseline": len(prompts) / len(sizes),
        }
        spreads = []
        for baseline, size in sizes.items():
            rows = [
                p.index for p, own in zip(prompts, baselines, strict=True) if own == baseline and size > 1
            ]
            spread = self.grouping.spread([self.grouping.position_of[row] for row in rows])
            spreads += [] if spread is None else [spread]
        return metrics | ({"groups/embedding_spread": sum(spreads) / len(spreads)} if spreads else {})

    def state_dict(self) -> dict[str, Any]:
        # The groups themselves: another machine's rounding may form others.
        return super().state_dict() | {"groups": [list(group) for group in self.grouping.members]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.grouping = replace(self.grouping, members=tuple(map(tuple, state["groups"])))
        self._epoch = -1

    def _order_of(self, epoch: int) -> list[int]:
        rng = random.Random(f"{self.seed}/{epoch}")
        groups = [list(group) for group in self.grouping.members]
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group)
        return [position for group in groups for position in group]


def make_sampler(
    dataset: PromptDataset,
    batch_size: int,
    groups: GroupConfig,
    curriculum: CurriculumConfig | None,
    reward_names: Sequence[str],
    *,
    seed: int,
) -> PromptSampler:
    """The sampler that `groups` and `curriculum` ask for.

    Raises:
        ValueError: settings that don't fit the dataset or the rewards.
    """
    if curriculum is not None:
        return DifficultySampler(dataset, batch_size, curriculum, reward_names, seed)
    if groups.shares_baselines:
        grouping = form_groups(dataset, groups, example_turns=2 * len(dataset.config.examples))
        return GroupSampler(dataset, batch_size, grouping, seed)
    return PromptSampler(dataset, batch_size, seed)
