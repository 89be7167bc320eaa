"""From prompts and a strategy to groups of prompts that share a baseline, every prompt in exactly one."""

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

PromptGroups = list[list[int]]  # positions in the dataset; the first of a group is its leader

# Equal vectors are at a distance of about 1e-7, not zero.
ROUNDING = 1e-6
BLOCK = 256  # prompts whose distances are computed at once
SCORED = ("completions", "step", "total_steps", "embeddings", "rewards")
"""Parameters by which a function of the user's asks to form groups after scoring."""
GIVEN = ("prompts", "batch_size", "group_size", *SCORED)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def form_groups(
    prompts: Sequence[Prompt], config: GroupConfig, distance: Distance | None = None, example_turns: int = 0
) -> PromptGroups:
    """Group a dataset as configured; no prompt is lost, and none is in two groups.

    Args:
        prompts: N prompts.
        config: strategy, sizes and threshold.
        distance: `prompt_distance`, for the strategies `semantic` and `combined`.
        example_turns: turns of each conversation that `dataset.examples` put there.

    Raises:
        ValueError: a strategy or a size that does not fit the prompts, or a function that cannot be imported
            or that returns neither one key for each prompt nor groups.
    """
    if config.strategy == "prompt":
        return [[position] for position in range(len(prompts))]
    keys = prompt_keys(prompts, config, example_turns) if distance is None else None
    return cut(prompts, config, distance=distance, keys=keys)


def prompt_keys(
    prompts: Sequence[Prompt], config: GroupConfig, example_turns: int = 0
) -> list[Hashable | None]:
    """What prompts of one group share, by the strategy `prefix` or a function; errors as of `form_groups`."""
    if config.strategy == "prefix":
        keys = [conversation_prefix(prompt, config.prefix_turns, example_turns) for prompt in prompts]
        if all(key is None for key in keys):
            raise ValueError(
                "groups.strategy = 'prefix' finds no prompt with earlier turns; it is for conversations of "
                "several turns: use another strategy"
            )
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

    Args:
        order: positions in the order in which they are grouped; all others are alone. None: as they come.
        distance: between positions, for clusters; None: prompts of one key are together.
        keys: N; None: all prompts have one key.
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
    places, radius = torch.tensor(own, dtype=torch.int64), 1 - config.similarity_threshold
    clusters = leader_clusters(
        len(own),
        lambda rows, others: distance(places[rows], places[others]),
        radius=radius,
        max_size=config.max_group_size,
    )
    kept = [group for group in clusters if len(group) >= config.min_group_size]
    rest = sorted(p for group in clusters if len(group) < config.min_group_size for p in group)
    return [*kept, *([position] for position in rest)]


def asked_after_scoring(function: Callable[..., Any], path: str) -> list[str]:
    """What a function of the user's is given by name after scoring; empty: it gets the prompts before.

    Raises:
        ValueError: the function asks for what there is not.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin may have no signature
        return []
    asked = [name for name in parameters if name in GIVEN]
    if {*asked} <= {"prompts"}:
        return []
    for name, parameter in parameters.items():
        if name not in GIVEN and parameter.default is parameter.empty and parameter.kind in NAMED:
            raise ValueError(
                f"groups.strategy = {path!r} asks for {name!r}: {choices(name, GIVEN)}; rename the "
                "parameter, or give it a default"
            )
    return asked


def read_keys(found: Any, count: int, config: GroupConfig) -> list[Hashable | None]:
    """One key for each of `count` prompts, from the keys or the groups that a user's function returned."""
    returned = f"groups.strategy = {config.strategy!r} returned"
    found = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(found, list | tuple):
        got = f"a {type(found).__name__}"
        raise ValueError(f"{returned} {got} for {count} prompts; return a list with one key each")
    found = [item.tolist() if hasattr(item, "tolist") else item for item in found]
    if found and all(isinstance(item, list) for item in found):
        return _keys_of_groups(found, count, returned)
    if len(found) != count:
        raise ValueError(f"{returned} {len(found)} keys for {count} prompts; return a list with one key each")
    for place, key in enumerate(found):
        if not isinstance(key, Hashable):
            raise ValueError(
                f"{returned} a {type(key).__name__} for prompt {place}; a key is text or a number, or None "
                "for a baseline of its own"
            )
    return found


def _keys_of_groups(groups: Sequence[Sequence[Any]], count: int, returned: str) -> list[Hashable | None]:
    keys: list[Hashable | None] = [None] * count
    for number, group in enumerate(groups):
        for position in group:
            if not isinstance(position, int) or not 0 <= position < count:
                raise ValueError(
                    f"{returned} position {position!r} in group {number}; positions of {count} prompts are "
                    f"0 to {count - 1}"
                )
            if keys[position] is not None:
                raise ValueError(
                    f"{returned} position {position} in group {keys[position]} and in group {number}; put "
                    "each prompt into one group at most"
                )
            keys[position] = number
    return keys


def check_sizes(prompts: Sequence[Prompt], config: GroupConfig) -> None:
    """Raises ValueError for a `size_by` whose column is not there or whose sizes the prompts cannot fill."""
    column, sizes = config.sizes()
    if not sizes:
        return
    if column not in prompts[0].columns:
        raise ValueError(
            f"groups.size_by.column = {column!r}: there is no such column: "
            f"{choices(column, prompts[0].columns)}"
        )
    counts = Counter(str(prompt.columns.get(column)) for prompt in prompts)
    for value, size in sizes.items():
        if not counts[value]:
            raise ValueError(f"groups.size_by.{value}: no row has this {column}: {choices(value, counts)}")
        if counts[value] < size:
            raise ValueError(
                f"groups.size_by.{value} = {size} cannot be filled: the dataset has {counts[value]} such "
                f"prompts; lower it to {counts[value]} at most"
            )


def with_enough(numbers: Sequence[int], min_group_size: int) -> list[int]:
    """Group numbers of a batch's prompts; one that fewer than `min_group_size` have becomes one for each."""
    present = Counter(numbers)
    return [
        number if present[number] >= min_group_size else -1 - place for place, number in enumerate(numbers)
    ]


def describe_groups(
    numbers: Sequence[int], embeddings: Tensor, table: CompletionTable | None
) -> dict[str, float]:
    """Metrics of a step's groups.

    Args:
        numbers: P, the same for prompts that share a baseline.
        embeddings: (P, D) of the prompts.
        table: their completions with rewards; None: not known yet.
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
