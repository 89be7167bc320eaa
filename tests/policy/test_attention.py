from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from grpo_fast.policy import PackedBatch, Policy, Sample, pack
from grpo_fast.policy.attention import PackedLayout


def packed(samples: list[Sample], *, share: bool = True, max_tokens: int = 10_000) -> list[PackedBatch]:
    return pack(samples, max_tokens=max_tokens, share_prompts=share, device="cpu")


def own_logprobs(policy: Policy, sample: Sample) -> torch.Tensor:
    """What the model's own forward says, alone and unpacked."""
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "cohere", "granite"])
@pytest.mark.parametrize("share", [True, False])
def test_packed_logprobs_are_those_of_each_sequence_alone(
    load: Callable[..., Policy], samples: list[Sample], family: str, share: bool
) -> None:
    policy = load(family)

    for batch in packed(samples, share=share, max_tokens=40):
        actual = policy.head.logits(policy.hidden_states(batch)).log_softmax(-1)
        bounds = batch.sequence_ids.bincount().tolist()
        for targets, advantages, rows in zip(
            batch.targets.split(bounds), batch.advantages.split(bounds), actual.split(bounds), strict=True
        ):
            (sample,) = (
                s
                for s in samples
                if s.completion_ids == tuple(targets.tolist())
                and torch.equal(torch.tensor(s.token_advantages), advantages)
            )
            torch.testing.assert_close(rows, own_logprobs(policy, sample), rtol=1e-4, atol=1e-4)


def test_the_sliding_window_of_the_tested_model_hides_something(load: Callable[..., Policy]) -> None:
    """Otherwise the comparison above would say nothing about windows."""
    policy = load("gemma2")
    (batch,) = packed([Sample((4, *range(10, 20)), (5, 6, 7), 0.0, 0, (0.0,) * 3)])
    layout = PackedLayout(batch, flex=False)

    (windowed,) = layout.masks(policy.base_model.config.sliding_window)
    (full,) = layout.masks(None)

    assert windowed.sum() < full.sum()


def test_the_flex_mask_is_the_dense_one(samples: list[Sample]) -> None:
    (batch,) = packed(samples)
    layout = PackedLayout(batch, flex=True)
    total = len(batch.input_ids)
    for window in (None, 3):
        mask = create_mask(
            lambda _b, _h, query, key, window=window: layout.visible(query, key, window),
            None,
            None,
            total,
            total,
            device="cpu",
        )[0, 0]

        assert torch.equal(mask, torch.block_diag(*layout.masks(window)).bool())


def test_gradient_checkpointing_changes_no_gradient(
    load: Callable[..., Policy], samples: list[Sample]
) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = load("gemma2", gradient_checkpointing=checkpointing)
        (batch,) = packed(samples)
        policy.hidden_states(batch).square().sum().backward()
        gradients.append({name: p.grad for name, p in policy.trainable().items() if p.grad is not None})

    assert gradients[0].keys() == gradients[1].keys() != set()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


@pytest.mark.parametrize("share", [True, False])
def test_neither_budget_nor_sharing_changes_loss_or_gradient(
    load: Callable[..., Policy], samples: list[Sample], share: bool
) -> None:
    def step(max_tokens: int, share: bool) -> tuple[float, dict[str, torch.Tensor], int]:
        policy = load("gemma2")
        policy.model.double()
        normaliser = sum(len(sample.completion_ids) for sample in samples)
        total, batches = 0.0, packed(samples, share=share, max_tokens=max_tokens)
        for batch in batches:
            hidden = policy.hidden_states(batch)
            logits = hidden @ policy.head.weight.T
            logprobs = (30 * torch.tanh(logits / 30)).log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
            loss = -(logprobs * batch.advantages).sum() / normaliser
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
def test_flex_attention_on_a_gpu_agrees_with_sdpa(load: Callable[..., Policy], samples: list[Sample]) -> None:
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
    load: Callable[..., Policy], samples: list[Sample], monkeypatch: pytest.MonkeyPatch
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
