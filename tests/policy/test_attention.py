"""Packed attention against each sequence alone, and the block mask against FlexAttention's own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import avg_pool2d

from grpo_fast.plan.measure import peak_bytes
from grpo_fast.policy import PackedBatch, Policy, Sample, pack
from grpo_fast.policy.attention import BLOCK, PackedLayout, visible_pairs

Load = Callable[..., Policy]


def packed(samples: list[Sample], *, share: bool = True, max_tokens: int = 10**6) -> list[PackedBatch]:
    return pack(samples, max_tokens=max_tokens, share_prompts=share, device="cpu")


def sample(group: int, prompt: int, completion: int) -> Sample:
    return Sample((group,) * prompt, (1,) * completion, 0.0, group, (0.0,) * completion)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "cohere", "granite"])
def test_packed_logprobs_are_those_of_each_sequence_alone(
    load: Load, samples: list[Sample], family: str
) -> None:
    policy = load(family)
    window = getattr(policy.base_model.config, "sliding_window", None)

    for share in (True, False):
        for batch in packed(samples, share=share, max_tokens=40):
            logprobs = policy.head.logits(policy.hidden_states(batch)).log_softmax(-1)
            rows = logprobs.split(batch.sequence_ids.bincount().tolist())
            for index, actual in zip(batch.sample_ids.tolist(), rows, strict=True):
                own = samples[index]
                ids = torch.tensor([own.prompt_ids + own.completion_ids])
                logits = policy.model(input_ids=ids, use_cache=False).logits
                alone = logits[0, len(own.prompt_ids) - 1 : -1].log_softmax(-1)
                torch.testing.assert_close(actual, alone, rtol=1e-4, atol=1e-4)
    # The window of Gemma 2 hides something, else the comparison would say nothing about windows.
    assert family != "gemma2" or window < max(len(s.prompt_ids) for s in samples)


@pytest.mark.parametrize("share", [True, False])
def test_neither_budget_nor_sharing_nor_checkpointing_changes_loss_or_gradient(
    load: Load, samples: list[Sample], share: bool
) -> None:
    def step(max_tokens: int, share: bool) -> tuple[float, dict[str, torch.Tensor], int]:
        policy = load("gemma2", gradient_checkpointing=max_tokens < 10_000)
        policy.model.double()
        total, batches = 0.0, packed(samples, share=share, max_tokens=max_tokens)
        for batch in batches:
            logits = policy.hidden_states(batch) @ policy.head.weight.T
            logprobs = (30 * torch.tanh(logits / 30)).log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
            loss = -(logprobs * batch.advantages).sum() / len(samples)
            loss.backward()
            total += loss.item()
        return total, {name: p.grad for name, p in policy.trainable().items()}, len(batches)

    (whole_loss, whole, one), (loss, split, count) = step(10_000, True), step(16, share)

    assert one == 1 < count
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.gpu
def test_flex_attention_on_a_gpu_agrees_with_sdpa(load: Load, samples: list[Sample]) -> None:
    results = []
    for attention in ("sdpa", "flex_attention"):
        policy = load("gemma2", device="cuda", attention=attention)
        (batch,) = pack(samples, max_tokens=10_000, share_prompts=True, device="cuda")
        hidden = policy.hidden_states(batch)
        hidden.square().sum().backward()
        results.append((hidden, policy.trainable()["model.layers.0.self_attn.q_proj.weight"].grad))

    for sdpa, flex in zip(*results, strict=True):
        torch.testing.assert_close(flex, sdpa, rtol=1e-2, atol=1e-2)


def test_flex_attention_stays_compiled_whatever_the_lengths(
    load: Load, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the limit torch would compute all T² scores; here it raises instead."""
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.integrations import flex_attention as integration

    compiled = torch.compile(flex_attention, backend="eager")
    monkeypatch.setattr(integration, "WrappedFlexAttention", lambda training: lambda: compiled)
    policy = load("gemma2")
    policy.attention = "flex_attention"
    torch._dynamo.reset()

    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for some in (samples[:1], samples * 9):
            (batch,) = packed(some)
            assert policy.hidden_states(batch).isfinite().all()


@pytest.mark.parametrize("share", [True, False])
def test_the_flex_mask_is_made_without_asking_the_device(
    samples: list[Sample], share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (batch,) = packed(samples, share=share)

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    for name in ("tolist", "item", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)

    masks = [PackedLayout(batch, flex=True).block_mask(window) for window in (None, 3)]

    assert {mask.seq_lengths for mask in masks} == {(len(batch.input_ids),) * 2}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("windowed", [False, True])
def test_every_mask_says_what_visible_says_of_each_pair_of_tokens(
    share: bool, windowed: bool, seed: int
) -> None:
    """Groups of one to four completions, from a token to more than two blocks long."""
    draw = random.Random(seed)

    def length() -> int:
        return draw.choice((1, draw.randint(1, 20), draw.randint(1, 2 * BLOCK)))

    for _ in range(6):
        prompts = {group: length() for group in range(draw.randint(1, 4))}
        groups = [group for group in prompts for _ in range(draw.randint(1, 4))]
        (batch,) = packed([sample(group, prompts[group], length()) for group in groups], share=share)
        lengths, total = batch.cu_seqlens.diff().tolist(), len(batch.input_ids)
        at_a_document = max(1, draw.choice(lengths) + draw.choice((-1, 0, 1)))
        window = draw.choice((1, at_a_document, draw.randint(1, 3 * BLOCK))) if windowed else None
        layout, index = PackedLayout(batch, flex=True), torch.arange(total)
        visible = layout.visible(index[:, None], index, window)

        dense = torch.zeros(total, total, dtype=torch.bool)
        own, seen = layout.own(index, 0), layout.seen(index, 0)
        for rows, columns, mask in zip(own, seen, layout.masks(window), strict=True):
            causal = torch.ones(len(rows), len(columns)).tril().bool()
            dense[rows[:, None], columns] = causal if mask is None else mask
        assert torch.equal(visible, dense)

        whole = -(-total // BLOCK) * BLOCK
        padded = torch.zeros(1, whole, whole)
        padded[0, :total, :total] = visible
        pairs = avg_pool2d(padded, BLOCK)[0] * BLOCK**2
        assert torch.equal(visible_pairs(layout.ranges(window)), pairs.int())

        found = layout.block_mask(window)
        own = create_block_mask(
            lambda _b, _h, query, key, layout=layout, window=window: layout.visible(query, key, window),
            *(None, None, total, total),
            device="cpu",
        )
        assert found.shape == own.shape and found.seq_lengths == own.seq_lengths
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            assert torch.equal(getattr(found, name), getattr(own, name)), name


def test_no_pair_of_tokens_takes_memory() -> None:
    (batch,) = packed([sample(group, 4000, 4001) for group in range(2)])
    tokens = len(batch.input_ids)

    peak = peak_bytes(
        lambda: PackedLayout(batch, flex=True), lambda layout: layout.block_mask(None), torch.device("cpu")
    )

    assert peak < 200 * tokens < tokens**2 / 50
