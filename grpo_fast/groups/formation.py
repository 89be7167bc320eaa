"""From a dataset and a strategy to groups of prompts that share a baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from grpo_fast.data.types import Prompt
from grpo_fast.groups.clusters import Groups, key_groups, leader_clusters, settle_leftovers
from grpo_fast.groups.config import GroupConfig
from grpo_fast.groups.criteria import Likeness, conversation_prefix, label_ids, make_likeness
from grpo_fast.lookup import load_callable


@dataclass(frozen=True)
class Grouping:
    """Which prompts of a dataset share a baseline. A position is a place in the dataset."""

    members: tuple[tuple[int, ...], ...]  # positions of each group; every position once
    rows: tuple[int, ...]  # `Prompt.index` of each position
    min_group_size: int = 2
    likeness: Likeness | None = None  # where prompts are grouped by distance

    @cached_property
    def group_of(self) -> dict[int, int]:
        """Group of each row."""
        return {self.rows[position]: group for group, part in enumerate(self.members) for position in part}

    @cached_property
    def position_of(self) -> dict[int, int]:
        return {row: position for position, row in enumerate(self.rows)}

    def shared(self, prompts: Sequence[Prompt]) -> list[int]:
        """For each prompt of a batch a number, the same for those that share a baseline.

        A group of which fewer than `min_group_size` prompts are in the batch shares none.
        """
        groups = [self.group_of[prompt.index] for prompt in prompts]
        present = Counter(groups)
        return [
            group if present[group] >= self.min_group_size else -1 - place
            for place, group in enumerate(groups)
        ]

    def spread(self, positions: Sequence[int]) -> float | None:
        """Mean distance between two prompts; None without distances, or for fewer than two prompts."""
        n = len(positions)
        if self.likeness is None or n < 2:
            return None
        places = torch.tensor(positions)
        distances = self.likeness.distance(places, places)
        return (distances.sum() - distances.diagonal().sum()).item() / (n * (n - 1))


def form_groups(prompts: Sequence[Prompt], config: GroupConfig, *, example_turns: int = 0) -> Grouping:
    """Group a dataset as configured; no prompt is lost, and none is in two groups.

    Args:
        prompts: N prompts.
        config: strategy, sizes and threshold.
        example_turns: turns of each conversation that `dataset.examples` put there.

    Raises:
        ValueError: a strategy that does not fit the prompts, or a function that cannot be imported or that
            returns something else than one key for each prompt.
    """
    sizes = {"min_size": config.min_group_size, "max_size": config.max_group_size}
    likeness = None
    if config.strategy in ("similarity", "combined"):
        likeness = make_likeness(prompts, config, example_turns)
        groups = _by_distance(len(prompts), likeness, config)
    elif config.strategy == "prompt":
        groups = [[position] for position in range(len(prompts))]
    elif config.strategy == "prefix":
        keys = [conversation_prefix(prompt, config.prefix_turns, example_turns) for prompt in prompts]
        if all(key is None for key in keys):
            raise ValueError(
                "groups.strategy = 'prefix' finds no prompt with earlier turns; it is for conversations of "
                "several turns: use another strategy"
            )
        groups = key_groups(label_ids(keys).tolist(), **sizes)
    else:
        groups = key_groups(label_ids(_own_keys(prompts, config.strategy)).tolist(), **sizes)
    return Grouping(
        members=tuple(map(tuple, groups)),
        rows=tuple(prompt.index for prompt in prompts),
        min_group_size=config.min_group_size,
        likeness=likeness,
    )


def _by_distance(n: int, likeness: Likeness, config: GroupConfig) -> Groups:
    groups = leader_clusters(
        n, likeness.distance, radius=1 - config.similarity_threshold, max_size=config.max_group_size
    )
    return settle_leftovers(
        groups,
        likeness.distance,
        min_size=config.min_group_size,
        max_size=config.max_group_size,
        nearest=config.leftovers == "nearest",
    )


def _own_keys(prompts: Sequence[Prompt], path: str) -> list[Hashable | None]:
    keys = load_callable(path, "groups.strategy")(prompts)
    if not isinstance(keys, list | tuple) or len(keys) != len(prompts):
        got = f"{len(keys)} keys" if isinstance(keys, list | tuple) else f"a {type(keys).__name__}"
        raise ValueError(
            f"groups.strategy = {path!r} returned {got} for {len(prompts)} prompts; return a list with "
            "one key each"
        )
    for place, key in enumerate(keys):
        if not isinstance(key, Hashable):
            raise ValueError(
                f"groups.strategy = {path!r} returned a {type(key).__name__} for prompt {place}; a key is "
                "text or a number, or None for a baseline of its own"
            )
    return list(keys)
