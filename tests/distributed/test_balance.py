"""Work balanced over ranks."""

from __future__ import annotations

import random
from itertools import product

import pytest

from grpo_fast.data.table import CompletionTable
from grpo_fast.distributed.shards import karmarkar_karp
from grpo_fast.distributed.world import World
from grpo_fast.policy.packing import TokenCosts, assign_to_ranks


def test_largest_differencing_gives_its_authors_sums():
    costs = [8, 7, 6, 5, 4]  # 8 against 7 and 6 against 5, then 4 against the two differences
    assert [sum(costs[i] for i in part) for part in karmarkar_karp(costs, 2)] == [16, 14]


def test_sets_are_nearly_as_even_as_the_evenest(seed):
    dice = random.Random(seed)
    costs = [dice.uniform(1, 10) for _ in range(8)]
    for parts in (1, 2, 3):
        found = karmarkar_karp(costs, parts)
        assert sorted(i for part in found for i in part) == list(range(8)) and len(found) == parts
        heaviest = max(sum(costs[i] for i in part) for part in found)
        best = min(
            max(
                sum(c for c, place in zip(costs, places, strict=True) if place == part)
                for part in range(parts)
            )
            for places in product(range(parts), repeat=8)
        )
        assert heaviest <= best + max(costs) / 2
    assert karmarkar_karp([], 3) == [[], [], []] and sorted(karmarkar_karp([2.0], 3)) == [[], [], [0]]


def table_of(groups: list[tuple[int, list[int]]]) -> CompletionTable:
    rows = [
        ((1,) * prompt, (2,) * length, group)
        for group, (prompt, lengths) in enumerate(groups)
        for length in lengths
    ]
    return CompletionTable.of(*zip(*rows, strict=True))


def work_of(table: CompletionTable, members: list[int], costs: TokenCosts) -> float:
    """Prompts counted once for each rank that has a completion of them."""
    own = table.select(members)
    rows = [*zip(own.prompt_lengths.tolist(), own.lengths.tolist(), own.groups.tolist(), strict=True)]
    prompts = {(group, prompt) for prompt, _, group in rows}
    return sum(costs.more_inputs(0, length) for _, length in prompts) + sum(
        costs.more_inputs(prompt, length - 1) + costs.target * length for prompt, length, _ in rows
    )


def test_groups_stay_whole_where_that_is_even_and_are_parted_where_it_is_not(seed):
    dice, costs = random.Random(seed), TokenCosts(input=100, target=30, pair=0.5)
    even = table_of([(40, [20] * 4)] * 6)
    dealt = assign_to_ranks(even, 3, costs)
    assert [len(even.groups[part].unique()) for part in dealt] == [2, 2, 2]

    long = table_of([(300, [5]), (5, [300]), (5, [150]), (150, [5])])  # prompts are work, too
    assert sorted(assign_to_ranks(long, 2, costs)) == [[0, 2], [1, 3]]

    lengths = [dice.randrange(5, 300) for _ in range(16)]
    uneven = table_of([(20, lengths), (20, [4, 4])])
    whole = assign_to_ranks(uneven, 2, costs, whole_groups=True)
    assert sorted(whole) == [[*range(16)], [16, 17]]
    dealt = assign_to_ranks(uneven, 2, costs)
    assert sorted(i for part in dealt for i in part) == list(range(18))
    assert dealt == assign_to_ranks(uneven, 2, costs) and all(part == sorted(part) for part in dealt)
    loads = [work_of(uneven, part, costs) for part in dealt]
    assert max(loads) <= 1.02 * sum(loads) / 2 + max(lengths) * 10


def test_one_rank_has_everything_and_too_many_ranks_leave_some_empty():
    few, costs = table_of([(3, [4, 5])]), TokenCosts(1, 1, 0)
    assert assign_to_ranks(few, 1, costs) == [[0, 1]]
    assert sorted(assign_to_ranks(few, 3, costs)) == [[], [0], [1]]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_shares_are_contiguous_in_rank_order_and_equal_but_for_one(size):
    for count in (0, 1, 7, 16):
        shares = [World(rank, size).share(range(count)) for rank in range(size)]
        assert [i for share in shares for i in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
