"""The block mask from ranges is FlexAttention's own, block for block."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from grpo_fast.plan.measure import peak_bytes
from grpo_fast.policy import PackedBatch, Sample, pack
from grpo_fast.policy.attention import PackedLayout
from grpo_fast.policy.block_mask import BLOCK, visible_pairs

FIELDS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


@pytest.fixture
def draw() -> random.Random:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return random.Random(seed)


def sample(group: int, prompt: int, completion: int) -> Sample:
    return Sample((group,) * prompt, (1,) * completion, 0.0, group, (0.0,) * completion)


def one_batch(samples: list[Sample], *, share: bool) -> PackedBatch:
    (batch,) = pack(samples, max_tokens=10**6, share_prompts=share, device="cpu")
    return batch


def random_batch(draw: random.Random, *, share: bool) -> PackedBatch:
    """Groups of one to four completions, from a token to more than two blocks long."""
    samples = []
    for group in range(draw.randint(1, 4)):
        prompt = draw.choice((1, draw.randint(1, 20), draw.randint(1, 2 * BLOCK)))
        samples += [
            sample(group, prompt, draw.choice((1, draw.randint(1, 20), draw.randint(1, 2 * BLOCK))))
            for _ in range(draw.randint(1, 4))
        ]
    return one_batch(samples, share=share)


def asked_of_every_pair(layout: PackedLayout, total: int, window: int | None) -> BlockMask:
    def sees(_batch: object, _head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return layout.visible(query, key, window)

    return create_block_mask(sees, None, None, total, total, device="cpu")


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("windowed", [False, True])
def test_it_is_what_create_block_mask_makes(draw: random.Random, share: bool, windowed: bool) -> None:
    for _ in range(8):
        batch = random_batch(draw, share=share)
        window = draw.choice((1, draw.randint(1, 20), draw.randint(1, 3 * BLOCK))) if windowed else None
        layout = PackedLayout(batch, flex=True)

        found = layout.block_mask(window)

        expected = asked_of_every_pair(layout, len(batch.input_ids), window)
        assert found.shape == expected.shape and found.seq_lengths == expected.seq_lengths
        for name in FIELDS:
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_full_blocks_need_no_second_look() -> None:
    # A document of three whole blocks: those below the diagonal are seen by every query of theirs.
    layout = PackedLayout(one_batch([sample(0, 2 * BLOCK, BLOCK + 1)], share=False), flex=True)

    mask = layout.block_mask(None)

    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1, 2]
    assert mask.kv_num_blocks.flatten().tolist() == [1, 1, 1]


def test_completions_of_one_prompt_do_not_see_each_other() -> None:
    # Each of these is one block of inputs: a completion's last token is none.
    layout = PackedLayout(one_batch([sample(0, BLOCK, BLOCK + 1) for _ in range(2)], share=True), flex=True)

    pairs = visible_pairs(layout._ranges(None))

    below, whole = BLOCK * (BLOCK + 1) // 2, BLOCK * BLOCK
    assert pairs.tolist() == [[below, 0, 0], [whole, below, 0], [whole, 0, below]]


def test_no_pair_of_tokens_takes_memory() -> None:
    batch = one_batch([sample(group, 4000, 4001) for group in range(2)], share=True)
    tokens = len(batch.input_ids)

    peak = peak_bytes(
        lambda: PackedLayout(batch, flex=True), lambda layout: layout.block_mask(None), torch.device("cpu")
    )

    assert peak < 200 * tokens < tokens**2 / 50
