"""How completions are divided into micro-batches."""

from __future__ import annotations

import random

from grpo_fast.preference.scoring import Request, split_by_tokens


def test_every_item_is_in_one_part_and_no_part_exceeds_the_budget_but_for_an_item_that_does():
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(50):
        sizes = [draw.randint(1, 60) for _ in range(draw.randint(0, 30))]
        parts = split_by_tokens(sizes, 50)
        assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
        assert all(sum(sizes[i] for i in part) <= 50 or len(part) == 1 for part in parts)
        assert all(part == sorted(part) for part in parts)


def test_a_prompt_counts_once_where_it_is_shared():
    request = Request((1, 2, 3), ((4,), (5, 6)))
    assert (request.num_tokens(), request.num_tokens(shared=False)) == (6, 9)
