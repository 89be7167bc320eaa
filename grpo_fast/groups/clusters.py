"""Prompts into groups of bounded size, every prompt in exactly one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Distance = Callable[[Tensor, Tensor], Tensor]  # positions (R,), (O,) -> (R, O) float32
Groups = list[list[int]]  # positions; the first of a group is its leader

# Equal vectors are at a distance of about 1e-7, not zero.
ROUNDING = 1e-6
BLOCK = 256


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
        led = [*open_groups, *([None] * len(block))]
        full = torch.zeros(len(led))
        full[len(leaders) :] = torch.inf
        for row, position in enumerate(block.tolist()):
            gap, nearest = (distances[row] + full).min(0)
            column = int(nearest)
            if gap > radius + ROUNDING:
                column = len(leaders) + row
                led[column] = []
                groups.append(led[column])
            led[column].append(position)
            full[column] = torch.inf if len(led[column]) >= max_size else 0.0
    return groups


def settle_leftovers(
    groups: Groups, distance: Distance, *, min_size: int, max_size: int, nearest: bool
) -> Groups:
    """Groups below `min_size` give their prompts to the nearest leader with room, or to themselves."""
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
    """Prompts of one label together, in as few even parts as `max_size` allows; small parts fall apart."""
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
