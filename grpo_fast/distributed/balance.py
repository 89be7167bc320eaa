"""A step's completions dealt over ranks so that all finish together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices into `costs` in `parts` sets of nearly equal sums (Karmarkar and Karp 1982, for k sets).

    The two partitions whose own sets differ most are joined, the heaviest set of one with the lightest of the
    other, until one partition is left. The same costs give the same sets.
    """
    if not costs:
        return [[] for _ in range(parts)]
    # (minus the difference of the heaviest and lightest set, a number that decides ties, sets by falling sum)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = [
        (-cost, i, [(cost, [i]), *((0.0, []) for _ in range(parts - 1))]) for i, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    for number in range(len(costs), 2 * len(costs) - 1):
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, own + other) for (a, own), (b, other) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    return [sorted(members) for _, members in heap[0][2]]
