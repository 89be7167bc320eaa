"""From a dataset and a strategy to groups of prompts that share a baseline, every prompt in exactly one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from grpo_fast.data.types import Prompt
from grpo_fast.groups.config import GroupConfig
from grpo_fast.groups.criteria import Likeness, conversation_prefix, label_ids, make_likeness
from grpo_fast.lookup import load_callable

Distance = Callable[[Tensor, Tensor], Tensor]  # positions (R,), (O,) -> (R, O) float32
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
    likeness: Likeness | None = None  # where prompts are grouped by distance

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
    min_size, max_size = config.min_group_size, config.max_group_size
    likeness = None
    keys: list[Hashable | None]
    if config.strategy in ("similarity", "combined"):
        likeness = make_likeness(prompts, config, example_turns)
        groups = leader_clusters(
            len(prompts), likeness.distance, radius=1 - config.similarity_threshold, max_size=max_size
        )
        nearest = config.leftovers == "nearest"
        groups = settle_leftovers(
            groups, likeness.distance, min_size=min_size, max_size=max_size, nearest=nearest
        )
    elif config.strategy == "prompt":
        groups = [[position] for position in range(len(prompts))]
    elif config.strategy == "prefix":
        keys = [conversation_prefix(prompt, config.prefix_turns, example_turns) for prompt in prompts]
        if all(key is None for key in keys):
            raise ValueError(
                "groups.strategy = 'prefix' finds no prompt with earlier turns; it is for conversations of "
                "several turns: use another strategy"
            )
        groups = key_groups(label_ids(keys).tolist(), min_size=min_size, max_size=max_size)
    else:
        keys = _own_keys(prompts, config.strategy)
        groups = key_groups(label_ids(keys).tolist(), min_size=min_size, max_size=max_size)
    return Grouping(
        members=tuple(map(tuple, groups)),
        rows=tuple(prompt.index for prompt in prompts),
        min_group_size=config.min_group_size,
        likeness=likeness,
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


def leader_clusters(n: int, distance: Distance, *, radius: float, max_size: int) -> Groups:
    """Each prompt in turn joins the nearest leader within `radius` whose group has room, or leads a new one.

    One pass (Hartigan 1975, Clustering Algorithms, chapter 3): deterministic, every member within `radius` of
    its leader, ties to the earlier group.
    """
    groups: Groups = []
    for start in range(0, n, BLOCK):
        block = torch.arange(start, min(start + BLOCK, n))
        open_groups = [group for group in groups if len(group) < max_size]
        leaders = torch.tensor([group[0] for group in open_groups], dtype=torch.int64)
        # A prompt of the block may come to lead: its distances stand in a column of their own.
        distances = distance(block, torch.cat([leaders, block]))
        led: Groups = [*open_groups, *([] for _ in block)]
        full = torch.zeros(len(led))
        full[len(leaders) :] = torch.inf
        for row, position in enumerate(block.tolist()):
            gap, nearest = (distances[row] + full).min(0)
            column = int(nearest)
            if gap > radius + ROUNDING:
                column = len(leaders) + row
                groups.append(led[column])
            led[column].append(position)
            full[column] = torch.inf if len(led[column]) >= max_size else 0.0
    return groups


def settle_leftovers(
    groups: Groups, distance: Distance, *, min_size: int, max_size: int, nearest: bool
) -> Groups:
    """Prompts of groups below `min_size` join the nearest leader with room, or become groups of one."""
    kept = [list(group) for group in groups if len(group) >= min_size]
    loose = sorted(position for group in groups if len(group) < min_size for position in group)
    if not nearest or not kept:
        return [*kept, *([position] for position in loose)]
    leaders = torch.tensor([group[0] for group in kept])
    full = torch.tensor([torch.inf if len(group) >= max_size else 0.0 for group in kept])
    alone: Groups = []
    for position in loose:
        gap, column = (distance(torch.tensor([position]), leaders)[0] + full).min(0)
        if gap == torch.inf:
            alone.append([position])
            continue
        kept[column].append(position)
        full[column] = torch.inf if len(kept[column]) >= max_size else 0.0
    return [*kept, *alone]


def key_groups(labels: Sequence[int], *, min_size: int, max_size: int) -> Groups:
    """Prompts of one label together, in as few even parts as `max_size` allows.

    A part below `min_size` becomes groups of one.
    """
    members: dict[int, list[int]] = {}
    for position, label in enumerate(labels):
        members.setdefault(label, []).append(position)
    groups: Groups = []
    for group in members.values():
        parts = -(-len(group) // max_size)
        for part in range(parts):
            chunk = group[part * len(group) // parts : (part + 1) * len(group) // parts]
            groups += [chunk] if len(chunk) >= min_size else [[position] for position in chunk]
    return groups
