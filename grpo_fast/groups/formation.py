"""From a dataset and a strategy to groups of prompts that share a baseline, every prompt in exactly one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from grpo_fast.config.groups import GroupConfig
from grpo_fast.config.lookup import load_callable
from grpo_fast.data.types import Prompt
from grpo_fast.groups.criteria import Distance, conversation_prefix

PromptGroups = list[list[int]]  # positions in the dataset; the first of a group is its leader

# Equal vectors are at a distance of about 1e-7, not zero.
ROUNDING = 1e-6
BLOCK = 256  # prompts whose distances are computed at once


def form_groups(
    prompts: Sequence[Prompt], config: GroupConfig, distance: Distance | None = None, example_turns: int = 0
) -> PromptGroups:
    """Group a dataset as configured; no prompt is lost, and none is in two groups.

    Args:
        prompts: N prompts.
        config: strategy, sizes and threshold.
        distance: `prompt_distance`, for the strategies `similarity` and `combined`.
        example_turns: turns of each conversation that `dataset.examples` put there.

    Raises:
        ValueError: a strategy that does not fit the prompts, or a function that cannot be imported or that
            returns something else than one key for each prompt.
    """
    if config.strategy == "prompt":
        return [[position] for position in range(len(prompts))]
    if distance is not None:
        radius = 1 - config.similarity_threshold
        clusters = leader_clusters(len(prompts), distance, radius=radius, max_size=config.max_group_size)
        kept = [group for group in clusters if len(group) >= config.min_group_size]
        rest = sorted(p for group in clusters if len(group) < config.min_group_size for p in group)
        return [*kept, *([position] for position in rest)]
    if config.strategy == "prefix":
        keys = [conversation_prefix(prompt, config.prefix_turns, example_turns) for prompt in prompts]
        if all(key is None for key in keys):
            raise ValueError(
                "groups.strategy = 'prefix' finds no prompt with earlier turns; it is for conversations of "
                "several turns: use another strategy"
            )
        return key_groups(keys, config)
    return key_groups(_own_keys(prompts, config.strategy), config)


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


def key_groups(keys: Sequence[Hashable | None], config: GroupConfig) -> PromptGroups:
    """Prompts of one key together, in as few even parts as the largest size allows.

    A part below the smallest size becomes groups of one; None is no key that others could share.
    """
    members: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        members.setdefault(object() if key is None else key, []).append(position)
    groups: PromptGroups = []
    for group in members.values():
        parts = -(-len(group) // config.max_group_size)
        for part in range(parts):
            chunk = group[part * len(group) // parts : (part + 1) * len(group) // parts]
            groups += [chunk] if len(chunk) >= config.min_group_size else [[place] for place in chunk]
    return groups


def leader_clusters(n: int, distance: Distance, *, radius: float, max_size: int) -> PromptGroups:
    """Each prompt in turn joins the nearest leader within `radius` whose group has room, or leads a new one.

    One pass (Hartigan 1975, Clustering Algorithms, chapter 3): deterministic, every member within `radius` of
    its leader, ties to the earlier group.
    """
    groups: PromptGroups = []
    for start in range(0, n, BLOCK):
        block = torch.arange(start, min(start + BLOCK, n))
        known = [group for group in groups if len(group) < max_size]
        # A prompt of the block may come to lead: its distances stand in a column of their own.
        columns: PromptGroups = [*known, *([] for _ in block)]
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
