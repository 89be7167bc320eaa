"""Which prompts a step draws together."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from grpo_fast.config.groups import CurriculumConfig, GroupConfig
from grpo_fast.data import Prompt, PromptDataset, PromptSampler
from grpo_fast.groups.criteria import prompt_distance
from grpo_fast.groups.curriculum import DifficultySampler
from grpo_fast.groups.formation import PromptGroups, form_groups


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
        return GroupSampler(dataset, batch_size, groups, seed, 2 * len(dataset.config.examples))
    return PromptSampler(dataset, batch_size, seed)


class GroupSampler(PromptSampler):
    """Shuffled epochs in which the prompts of a group follow each other, so that a batch has them together.

    Every prompt still comes once an epoch. Where a batch ends within a group, its parts share what they can.
    """

    def __init__(
        self,
        dataset: Sequence[Prompt],
        batch_size: int,
        config: GroupConfig,
        seed: int = 0,
        example_turns: int = 0,
    ) -> None:
        """Arguments and errors as of `form_groups`."""
        super().__init__(dataset, batch_size, seed)
        self.min_group_size = config.min_group_size
        self.distance = None
        if config.strategy in ("similarity", "combined"):
            self.distance = prompt_distance(dataset, config, example_turns)
        self._position_of = {prompt.index: position for position, prompt in enumerate(dataset)}
        self._use(form_groups(dataset, config, self.distance, example_turns))

    def _use(self, groups: PromptGroups) -> None:
        self.groups = groups
        self._group_of = {position: number for number, group in enumerate(groups) for position in group}

    def baseline_groups(self, prompts: Sequence[Prompt]) -> list[int]:
        """A group of which fewer than `min_group_size` prompts are in the batch shares no baseline."""
        groups = [self._group_of[self._position_of[prompt.index]] for prompt in prompts]
        present = Counter(groups)
        return [
            group if present[group] >= self.min_group_size else -1 - place
            for place, group in enumerate(groups)
        ]

    def metrics(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Share of prompts that share a baseline, prompts a baseline, the distance of those that share."""
        groups: dict[int, list[int]] = {}
        for prompt, baseline in zip(prompts, self.baseline_groups(prompts), strict=True):
            groups.setdefault(baseline, []).append(self._position_of[prompt.index])
        sharing = [group for group in groups.values() if len(group) > 1]
        metrics = {
            "groups/sharing": sum(map(len, sharing)) / len(prompts),
            "groups/prompts_per_baseline": len(prompts) / len(groups),
        }
        spreads = [spread for group in sharing if (spread := self.spread(group)) is not None]
        return metrics | ({"groups/embedding_spread": fmean(spreads)} if spreads else {})

    def spread(self, positions: Sequence[int]) -> float | None:
        """Mean distance between two prompts; None without distances, or for fewer than two prompts."""
        n = len(positions)
        if self.distance is None or n < 2:
            return None
        places = torch.tensor(positions)
        distances = self.distance(places, places)
        return (distances.sum() - distances.diagonal().sum()).item() / (n * (n - 1))

    def state_dict(self) -> dict[str, Any]:
        # The groups themselves: another machine's rounding may form others.
        return super().state_dict() | {"groups": self.groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._use(state["groups"])
        self._epoch = -1

    def _order_of(self, epoch: int) -> list[int]:
        rng = random.Random(f"{self.seed}/{epoch}")
        groups = [list(group) for group in self.groups]
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group)
        return [position for group in groups for position in group]
