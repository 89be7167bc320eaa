"""Form groups of prompts that share a baseline, each prompt in exactly one group."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_fast.config.groups import GroupConfig
from grpo_fast.config.lookup import choices, load_callable
from grpo_fast.data.table import CompletionTable
from grpo_fast.data.types import Prompt
from grpo_fast.groups.advantages import spread_within
from grpo_fast.groups.criteria import Distance, conversation_prefix, distinct_bigrams

PromptGroups = list[list[int]]  # positions in the dataset

ROUNDING = 1e-6  # equal vectors have a distance of about 1e-7
BLOCK = 256  # prompts whose distances are computed at once
# Parameters of a user's function; one that names more than `prompts` forms groups after scoring.
GIVEN = (
    *("prompts", "batch_size", "group_size"),
    *("completions", "step", "total_steps", "embeddings", "rewards"),
)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def form_groups(
    prompts: Sequence[Prompt], config: GroupConfig, distance: Distance | None = None, example_turns: int = 0
) -> PromptGroups:
    """Group a dataset as configured, by `distance` between positions or by keys.

    `example_turns` counts the turns of configured examples in each conversation. Raises ValueError for a
    strategy that does not fit the prompts, or a function that fails to return keys or groups.
    """
    if config.strategy == "prompt":
        return [[position] for position in range(len(prompts))]
    keys = prompt_keys(prompts, config, example_turns) if distance is None else None
    return cut(prompts, config, distance=distance, keys=keys)


def prompt_keys(
    prompts: Sequence[Prompt], config: GroupConfig, example_turns: int = 0
) -> list[Hashable | None]:
    """Return each prompt's key, by the strategy `prefix` or a function; errors as for `form_groups`."""
    if config.strategy == "prefix":
        keys = [conversation_prefix(prompt, config.prefix_turns, example_turns) for prompt in prompts]
        if all(key is None for key in keys):
            problem = "groups.strategy = 'prefix' finds no prompt with earlier turns"
            raise ValueError(f"{problem}: use another strategy for prompts of one turn")
        return [*keys]
    return read_keys(load_callable(config.strategy, "groups.strategy")(prompts), len(prompts), config)


def cut(
    prompts: Sequence[Prompt],
    config: GroupConfig,
    order: Sequence[int] | None = None,
    *,
    distance: Distance | None = None,
    keys: Sequence[Hashable | None] | None = None,
) -> PromptGroups:
    """Cut prompts into groups of allowed sizes, in which `size_by.column` has one value.

    They are clustered by `distance` between positions or, without it, grouped by `keys` (None: all equal).
    Positions that are not in `order` stay alone.
    """
    column, sizes = config.sizes()
    order = range(len(prompts)) if order is None else order
    members: dict[Any, list[int]] = {}
    for position in order:
        members.setdefault(str(prompts[position].columns.get(column)) if sizes else None, []).append(position)
    groups: PromptGroups = [[position] for position in sorted({*range(len(prompts))} - {*order})]
    for value, own in members.items():
        sized = config.model_copy(update={"max_group_size": sizes.get(value, config.max_group_size)})
        if distance is None:
            found = key_groups([0 if keys is None else keys[position] for position in own], sized)
        else:
            found = _clusters(own, sized, distance)
        groups += [[own[place] for place in group] for group in found]
    return groups


def _clusters(own: Sequence[int], config: GroupConfig, distance: Distance) -> PromptGroups:
    places, least = torch.tensor(own, dtype=torch.int64), config.min_group_size
    clusters = leader_clusters(
        len(own),
        lambda rows, others: distance(places[rows], places[others]),
        radius=1 - config.similarity_threshold,
        max_size=config.max_group_size,
    )
    rest = sorted(place for group in clusters if len(group) < least for place in group)
    return [*(group for group in clusters if len(group) >= least), *([place] for place in rest)]


def asked_after_scoring(function: Callable[..., Any], path: str) -> list[str]:
    """Return the arguments of a user's function that groups after scoring; empty if it groups before."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin may have no signature
        return []
    asked = [name for name in parameters if name in GIVEN]
    if {*asked} <= {"prompts"}:
        return []
    for name, parameter in parameters.items():
        if name not in GIVEN and parameter.default is parameter.empty and parameter.kind in NAMED:
            problem = f"groups.strategy = {path!r} asks for {name!r}: {choices(name, GIVEN)}"
            raise ValueError(f"{problem}; rename the parameter, or give it a default")
    return asked


def read_keys(found: Any, count: int, config: GroupConfig) -> list[Hashable | None]:
    """Return a key for each of `count` prompts from a user's function, which returned keys or groups."""
    returned = f"groups.strategy = {config.strategy!r} returned"
    found = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(found, list | tuple):
        problem = f"{returned} a {type(found).__name__} for {count} prompts"
        raise ValueError(f"{problem}; return a list with one key each")
    found = [item.tolist() if hasattr(item, "tolist") else item for item in found]
    if found and all(isinstance(item, list) for item in found):
        return _keys_of_groups(found, count, returned)
    if len(found) != count:
        raise ValueError(f"{returned} {len(found)} keys for {count} prompts; return a list with one key each")
    for place, key in enumerate(found):
        if not isinstance(key, Hashable):
            problem = f"{returned} a {type(key).__name__} for prompt {place}"
            raise ValueError(f"{problem}; return text, a number, or None for a baseline of its own")
    return found


def _keys_of_groups(groups: Sequence[Sequence[Any]], count: int, returned: str) -> list[Hashable | None]:
    keys: list[Hashable | None] = [None] * count
    for number, group in enumerate(groups):
        for position in group:
            if not isinstance(position, int) or not 0 <= position < count:
                problem = f"{returned} position {position!r} in group {number}"
                raise ValueError(f"{problem}; positions are 0 to {count - 1}")
            if keys[position] is not None:
                problem = f"{returned} position {position} in group {keys[position]} and in group {number}"
                raise ValueError(f"{problem}; put each prompt into one group at most")
            keys[position] = number
    return keys


def check_sizes(prompts: Sequence[Prompt], config: GroupConfig) -> None:
    """Raise ValueError for a `size_by` with an unknown column, or sizes that the prompts cannot fill."""
    column, sizes = config.sizes()
    if not sizes:
        return
    if column not in prompts[0].columns:
        known = choices(column, prompts[0].columns)
        raise ValueError(f"groups.size_by.column = {column!r}: there is no such column: {known}")
    counts = Counter(str(prompt.columns.get(column)) for prompt in prompts)
    for value, size in sizes.items():
        if not counts[value]:
            raise ValueError(f"groups.size_by.{value}: no row has this {column}: {choices(value, counts)}")
        if counts[value] < size:
            problem = f"groups.size_by.{value} = {size} cannot be filled"
            raise ValueError(f"{problem}: set it to the dataset's {counts[value]} such prompts at most")


def with_enough(numbers: Sequence[int], min_group_size: int) -> list[int]:
    """Give prompts of groups with fewer than `min_group_size` in the batch a group number of their own."""
    present = Counter(numbers)
    return [
        number if present[number] >= min_group_size else -1 - place for place, number in enumerate(numbers)
    ]


def describe_groups(
    numbers: Sequence[int], embeddings: Tensor, table: CompletionTable | None
) -> dict[str, float]:
    """Compute the metrics of a step's groups.

    `numbers` are equal for prompts that share a baseline; `embeddings` is (P, D); `table` has their scored
    completions, if known.
    """
    owners = torch.tensor(numbers).unique(return_inverse=True)[1]
    groups = [(owners == number).nonzero()[:, 0] for number in range(int(owners.max()) + 1)]
    sharing = [group for group in groups if len(group) > 1]
    metrics = {
        "groups/number": len(groups),
        "groups/size_mean": len(numbers) / len(groups),
        "groups/sharing": sum(map(len, sharing)) / len(numbers),
    }
    if sharing:
        distances = torch.cat([(embeddings[g] - embeddings[g].mean(0)).norm(dim=1) for g in sharing])
        metrics["groups/centroid_distance"] = distances.mean().item()
    if table is not None:
        means = table.by_group("reward").nanmean(1)
        metrics["groups/diversity"] = distinct_bigrams(table, owners[table.groups]).mean().item()
        rows = pad_sequence([means[group] for group in groups], batch_first=True, padding_value=torch.nan)
        metrics["groups/reward_spread"] = spread_within(rows)
    return metrics


def key_groups(keys: Sequence[Hashable | None], config: GroupConfig) -> PromptGroups:
    """Group prompts of one key, in as few even parts as the largest size allows.

    A part below the smallest size becomes groups of one, and so does each prompt of the key None.
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
    """Let each prompt in turn join the nearest leader within `radius` with room, or lead a new group.

    One pass (Hartigan 1975, Clustering Algorithms, chapter 3). Ties go to the earlier group. The first of a
    group is its leader.
    """
    groups: PromptGroups = []
    for start in range(0, n, BLOCK):
        block = torch.arange(start, min(start + BLOCK, n))
        known = [group for group in groups if len(group) < max_size]
        # Each prompt of the block may become a leader, so it has a column of distances.
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
