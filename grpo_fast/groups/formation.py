"""From a dataset and a strategy to groups of prompts that share a baseline, every prompt in exactly one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from grpo_fast.data.types import Prompt
from grpo_fast.groups.config import GroupConfig
from grpo_fast.groups.criteria import Distance, conversation_prefix, prompt_distance
from grpo_fast.lookup import load_callable

Groups = list[list[int]]  # positions; the first of a group is its leader

# Equal vectors are at a distance of about 1e-7, not zero.
ROUNDING = 1e-6
BLOCK = 256


@dataclass(frozen=True)
class Grouping:
    """Which prompts of a dataset share a baseline. A position is a place in the dataset."""

    members: tuple[tuple[int, ...], ...]  # positions of each group; every position once
    rows: tuple[int, ...]  # `Prompt.index` of each position
    min_group_size: int = 2
    distance: Distance | None = None  # where prompts are grouped by one

    @cached_property
    def group_of(self) -> dict[int, int]:
        """Group of each row."""
        return {self.rows[position]: group for group, part in enumerate(self.members) for position in part}

    @cached_property
    def position_of(self) -> dict[int, int]:
        return {row: position for position, row in enumerate(self.rows)}

    def baseline_groups(self, prompts: Sequence[Prompt]) -> list[int]:
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
        if self.distance is None or n < 2:
            return None
        places = torch.tensor(positions)
        distances = self.distance(places, places)
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
    distance = None
    if config.strategy in ("similarity", "combined"):
        distance = prompt_distance(prompts, config, example_turns)
        radius = 1 - config.similarity_threshold
        groups = leader_clusters(len(prompts), distance, radius=radius, max_size=config.max_group_size)
        groups = settle_leftovers(groups, distance, config)
    elif config.strategy == "prompt":
        groups = [[position] for position in range(len(prompts))]
    elif config.strategy == "prefix":
        groups = key_groups(_prefixes(prompts, config, example_turns), config)
    else:
        groups = key_groups(_own_keys(prompts, config.strategy), config)
    rows = tuple(prompt.index for prompt in prompts)
    return Grouping(tuple(map(tuple, groups)), rows, config.min_group_size, distance)


def _prefixes(prompts: Sequence[Prompt], config: GroupConfig, example_turns: int) -> list[Hashable | None]:
    keys = [conversation_prefix(prompt, config.prefix_turns, example_turns) for prompt in prompts]
    if all(key is None for key in keys):
        raise ValueError(
            "groups.strategy = 'prefix' finds no prompt with earlier turns; it is for conversations of "
            "several turns: use another strategy"
        )
    return list(keys)


def _own_keys(prompts: Sequence[Prompt], path: str) -> list[Hashable | None]:
    keys = load_callable(path, "groups.strategy")(prompts)
    returned = f"groups.strategy = {path!r} returned"
    if not isinstance(keys, list | tuple) or len(keys) != len(prompts):
        got = f"{len(keys)} keys" if isinstance(keys, list | tuple) else f"a {type(keys).__name__}"
        raise ValueError(f"{returned} {got} for {len(prompts)} prompts; return a list with one key each")
    for place, key in enumerate(keys):
        if not isinstance(key, Hashable):
            raise ValueError(
                f"{returned} a {type(key).__name__} for prompt {place}; a key is text or a number, or None "
                "for a baseline of its own"
            )
    return list(keys)


def leader_clusters(n: int, distance: Distance, *, radius: float, max_size: int) -> Groups:
    """Each prompt in turn joins the nearest leader within `radius` whose group has room, or leads a new one.

    One pass (Hartigan 1975, Clustering Algorithms, chapter 3): deterministic, every member within `radius` of
    its leader, ties to the earlier group.
    """
    groups: Groups = []
    for start in range(0, n, BLOCK):
        block = torch.arange(start, min(start + BLOCK, n))
        known = [group for group in groups if len(group) < max_size]
        # A prompt of the block may come to lead: its distances stand in a column of their own.
        columns: Groups = [*known, *([] for _ in block)]
        leaders = torch.tensor([group[0] for group in known], dtype=torch.int64)
        distances = distance(block, torch.cat([leaders, block]))
        has_room = torch.arange(len(columns)) < len(known)
        for row, position in enumerate(block.tolist()):
            gap, nearest = distances[row].where(has_room, torch.inf).min(0)
            column = int(nearest)
            if gap > radius + ROUNDING:
                column = len(known) + row
                groups.append(columns[column])
            columns[column].append(position)
            has_room[column] = len(columns[column]) < max_size
    return groups


def settle_leftovers(groups: Groups, distance: Distance, config: GroupConfig) -> Groups:
    """Prompts of groups that are too small join the nearest leader with room, or become groups of one."""
    kept = [list(group) for group in groups if len(group) >= config.min_group_size]
    loose = sorted(p for group in groups if len(group) < config.min_group_size for p in group)
    alone: Groups = []
    for position in loose:
        room = [group for group in kept if len(group) < config.max_group_size]
        if config.leftovers == "own" or not room:
            alone.append([position])
        else:
            leaders = torch.tensor([group[0] for group in room])
            room[int(distance(torch.tensor([position]), leaders).argmin())].append(position)
    return [*kept, *alone]


def key_groups(keys: Sequence[Hashable | None], config: GroupConfig) -> Groups:
    """Prompts of one key together, in as few even parts as the largest size allows.

    A part below the smallest size becomes groups of one; None is no key that others could share.
    """
    members: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        members.setdefault(object() if key is None else key, []).append(position)
    groups: Groups = []
    for group in members.values():
        parts = -(-len(group) // config.max_group_size)
        for part in range(parts):
            chunk = group[part * len(group) // parts : (part + 1) * len(group) // parts]
            groups += [chunk] if len(chunk) >= config.min_group_size else [[place] for place in chunk]
    return groups
