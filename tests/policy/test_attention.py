"""Packed attention against each sequence alone, and the block mask against FlexAttention's own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from grpo_fast.plan.measure import peak_bytes
from grpo_fast.policy import PackedBatch, Policy, Sample, pack
from grpo_fast.policy.attention import BLOCK, PackedLayout, visible_pairs

Load = Callable[..., Policy]


def packed(samples: list[Sample], *, share: bool = True, max_tokens: int = 10**6) -> list[PackedBatch]:
    return pack(samples, max_tokens=max_tokens, share_prompts=share, device="cpu")


def own_logprobs(policy: Policy, sample: Sample) -> torch.Tensor:
    """What the model's own forward says, alone and unpacked."""
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "cohere", "granite"])
@pytest.mark.parametrize("share", [True, False])
def test_packed_logprobs_are_those_of_each_sequence_alone(
    load: Load, samples: list[Sample], family: str, share: bool
) -> None:
    policy = load(family)

    for batch in packed(samples, share=share, max_tokens=40):
        logprobs = policy.head.logits(policy.hidden_states(batch)).log_softmax(-1)
        rows = logprobs.split(batch.sequence_ids.bincount().tolist())
        for index, actual in zip(batch.sample_ids.tolist(), rows, strict=True):
            torch.testing.assert_close(actual, own_logprobs(policy, samples[index]), rtol=1e-4, atol=1e-4)


def test_the_sliding_window_of_the_tested_model_hides_something(load: Load) -> None:
    """Otherwise the comparison above would say nothing about windows."""
    (batch,) = packed([Sample((4, *range(10, 20)), (5, 6, 7), 0.0, 0, (0.0,) * 3)])
    layout = PackedLayout(batch, flex=False)

    (windowed,) = layout.masks(load("gemma2").base_model.config.sliding_window)
    (full,) = layout.masks(None)

    assert windowed.sum() < full.sum()


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

    whole_loss, whole, count = step(10_000, True)
    assert count == 1
    loss, split, count = step(16, share)

    assert count > 1
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
        for some in (samples[:1], samples, samples * 9):
            for batch in packed(some):
                assert policy.hidden_states(batch).isfinite().all()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_the_flex_mask_is_made_without_asking_the_device(
    samples: list[Sample], share: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (batch,) = packed(samples, share=share)

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    for name in ("tolist", "item", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)

    mask = PackedLayout(batch, flex=True).block_mask(window)

    assert mask.seq_lengths == (len(batch.input_ids),) * 2


def sample(group: int, prompt: int, completion: int) -> Sample:
    return Sample((group,) * prompt, (1,) * completion, 0.0, group, (0.0,) * completion)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("windowed", [False, True])
def test_the_block_mask_is_flex_attentions_own_and_the_dense_one(share: bool, windowed: bool) -> None:
    """Groups of one to four completions, from a token to more than two blocks long."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)

    def length() -> int:
        return draw.choice((1, draw.randint(1, 20), draw.randint(1, 2 * BLOCK)))

    for _ in range(8):
        prompts = {group: length() for group in range(draw.randint(1, 4))}
        groups = [group for group in prompts for _ in range(draw.randint(1, 4))]
        (batch,) = packed([sample(group, prompts[group], length()) for group in groups], share=share)
        window = draw.choice((1, draw.randint(1, 20), draw.randint(1, 3 * BLOCK))) if windowed else None
        layout, total = PackedLayout(batch, flex=True), len(batch.input_ids)

        found = layout.block_mask(window)

        def sees(_b, _h, query, key, layout=layout, window=window) -> torch.Tensor:
            return layout.visible(query, key, window)

        expected = create_block_mask(sees, None, None, total, total, device="cpu")
        assert found.shape == expected.shape and found.seq_lengths == expected.seq_lengths
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        index = torch.arange(total)
        causal = [torch.ones(n, n).tril().bool() for n in layout.lengths]
        dense = [own if own is not None else c for own, c in zip(layout.masks(window), causal, strict=True)]
        assert torch.equal(layout.visible(index[:, None], index, window), torch.block_diag(*dense).bool())


def test_full_blocks_need_no_second_look() -> None:
    # A document of three whole blocks: those below the diagonal are seen by every query of theirs.
    (batch,) = packed([sample(0, 2 * BLOCK, BLOCK + 1)], share=False)

    mask = PackedLayout(batch, flex=True).block_mask(None)

    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1, 2]
    assert mask.kv_num_blocks.flatten().tolist() == [1, 1, 1]


def test_completions_of_one_prompt_do_not_see_each_other() -> None:
    # Each of these is one block of inputs: a completion's last token is none.
    (batch,) = packed([sample(0, BLOCK, BLOCK + 1) for _ in range(2)])

    pairs = visible_pairs(PackedLayout(batch, flex=True).ranges(None))

    below, whole = BLOCK * (BLOCK + 1) // 2, BLOCK * BLOCK
    assert pairs.tolist() == [[below, 0, 0], [whole, below, 0], [whole, 0, below]]


def test_no_pair_of_tokens_takes_memory() -> None:
    (batch,) = packed([sample(group, 4000, 4001) for group in range(2)])
    tokens = len(batch.input_ids)

    peak = peak_bytes(
        lambda: PackedLayout(batch, flex=True), lambda layout: layout.block_mask(None), torch.device("cpu")
    )

    assert peak < 200 * tokens < tokens**2 / 50
