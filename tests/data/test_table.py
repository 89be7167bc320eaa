"""The table: selected, joined, divided and sent, a completion keeps what is known of it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_fast.data.table import UNKNOWN, CompletionTable


def drawn(
    seed: int, groups: int = 4
) -> tuple[CompletionTable, list[tuple[list[int], list[int], int, float]]]:
    """A table, and its rows: prompt, tokens, group, reward. A group may have several prompts."""
    dice = random.Random(seed)
    rows = []
    for group in range(groups):
        prompts = [dice.choices(range(50), k=dice.randint(1, 5)) for _ in range(2)]
        for _ in range(dice.randint(1, 4)):
            tokens = dice.choices(range(50), k=dice.randint(1, 6))
            rows.append((dice.choice(prompts), tokens, group, dice.random()))
    table = CompletionTable.of(
        [prompt for prompt, *_ in rows],
        [tokens for _, tokens, *_ in rows],
        [group for *_, group, _ in rows],
        facts={"reward": torch.tensor([reward for *_, reward in rows])},
        inputs={"told": [np.array([*prompt, *tokens[:-1]])[:, None] for prompt, tokens, *_ in rows]},
        objects={"name": [str(tokens) for _, tokens, *_ in rows]},
        scaled=[[token * reward for token in tokens] for _, tokens, _, reward in rows],
    )
    return table, rows


def assert_rows(table: CompletionTable, rows: list[tuple[list[int], list[int], int, float]]) -> None:
    assert table.groups.tolist() == [group for *_, group, _ in rows]
    for row, (prompt, tokens, _, reward) in enumerate(rows):
        assert (table.prompt_of(row).tolist(), table.tokens_of(row).tolist()) == (prompt, tokens)
        scaled = table.columns["scaled"][table.offsets[row] : table.offsets[row + 1]]
        torch.testing.assert_close(scaled, torch.tensor(tokens) * reward)
        assert table.objects["name"][row] in (None, str(tokens))
        prompt_at = table.prompt_offsets[table.prompts[row]]
        own_at = len(table.prompt_ids) + table.offsets[row]
        told = [
            table.inputs["told"][at:][: len(ids), 0] for at, ids in ((prompt_at, prompt), (own_at, tokens))
        ]
        assert torch.cat(told).tolist() == [*prompt, *tokens[:-1], UNKNOWN]
    torch.testing.assert_close(table.facts["reward"], torch.tensor([reward for *_, reward in rows]))


def test_rows_keep_their_prompt_columns_and_facts_wherever_they_go(seed: int) -> None:
    table, rows = drawn(seed)
    assert_rows(table, rows)
    order = random.Random(seed).sample(range(len(rows)), k=max(1, len(rows) - 2))
    assert_rows(table.select(order), [rows[i] for i in order])

    other, others = drawn(seed + 1, groups=2)
    later = [(*row[:2], row[2] + 4, row[3]) for row in others]
    assert_rows(CompletionTable.join([table, other]), rows + later)

    assert len(table.select([0]).prompt_ids) == len(rows[0][0])  # a prompt that nobody answers is not kept
    chosen = table.select_groups([3, 1])
    renumbered = [(*row[:2], new, row[3]) for new, old in ((0, 3), (1, 1)) for row in rows if row[2] == old]
    assert_rows(chosen, renumbered)
    assert not len(table.select_groups([])) and table.select_groups([]).columns["scaled"].shape == (0,)


def test_what_ranks_send_is_the_table_without_its_objects(seed: int) -> None:
    table, rows = drawn(seed)
    received = CompletionTable.from_tensors(table.tensors())
    joined = CompletionTable.join([table, received])  # objects of another rank are None
    assert joined.objects["name"] == (*table.objects["name"], *[None] * len(rows))
    assert_rows(joined, rows + [(*row[:2], row[2] + 4, row[3]) for row in rows])


def test_a_column_of_some_completions_only_is_refused(seed: int) -> None:
    table, _ = drawn(seed)
    other = table.with_columns(told=torch.zeros(len(table.token_ids)))
    with pytest.raises(ValueError, match=r"columns \['told'\]: only some completions have them"):
        CompletionTable.join([table, other])


def test_sums_and_spreads_are_of_each_completions_own_tokens(seed: int) -> None:
    table, rows = drawn(seed)
    written = torch.tensor([random.Random(seed + i).random() < 0.7 for i in range(len(table.mask))])
    table = replace(table, mask=written)
    lengths = table.lengths.tolist()
    parts = [*zip(table.columns["scaled"].split(lengths), written.split(lengths), strict=True)]
    torch.testing.assert_close(
        table.sums(table.columns["scaled"]), torch.stack([values[mask].sum() for values, mask in parts])
    )
    assert table.num_targets.tolist() == [int(mask.sum()) for _, mask in parts]
    torch.testing.assert_close(
        table.spread(table.facts["reward"]),
        torch.tensor([reward for _, tokens, _, reward in rows for _ in tokens]),
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": [(1,), ()], "token_ids": [(1,), (2,)]}, r"prompts\[1\] is empty"),
        ({"prompts": [(1,)], "token_ids": [()]}, r"token_ids\[0\] is empty"),
        (
            {"prompts": [(1,)], "token_ids": [(1, 2)], "mask": [(False, False)]},
            "has no sampled token",
        ),
        ({"prompts": [(1,)], "token_ids": [(1, 2)], "mask": [(True,)]}, r"mask\[0\] has 1 entries for 2"),
        ({"prompts": [(1,)], "token_ids": [(1, 2)], "values": [()]}, r"values\[0\] has 0 entries for 2"),
    ],
)
def test_bad_input_is_named(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompletionTable.of(**given)
