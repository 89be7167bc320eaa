"""What the engine asks of vLLM before anything depends on it, and what a sleep may drop, on one engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grpo_fast.rollout import Sampling
from grpo_fast.rollout.vllm.checks import (
    agree,
    require_agreement,
    require_same_tokenizer,
    unregistered_tensors,
)

SAMPLING = Sampling(max_completion_length=20, seed=11)
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12)]


@pytest.fixture(scope="module")
def direct(saved_model, running_vllm) -> Iterator[SimpleNamespace]:
    """An engine that lies in memory as on a GPU, its head frozen."""
    options = {"dtype": "float32", "plain": True, "head": False}
    with running_vllm(saved_model(tied=False), **options) as (engine, policy):
        yield SimpleNamespace(engine=engine, policy=policy)


@pytest.fixture
def dropping(direct, monkeypatch):
    """`dropping(drop)`: the engine's sleep is of level 2 and ends with `drop`, as a CPU drops nothing."""

    def dropping(drop) -> None:
        sleep = direct.engine._vllm.sleep

        def dropping_sleep(level: int) -> None:
            sleep(level=level)
            if level == 2:
                drop()

        monkeypatch.setattr(direct.engine._vllm, "sleep", dropping_sleep)
        monkeypatch.setattr(direct.engine._cycle, "level", 2)

    return dropping


def step(direct, shake, largest_difference) -> float:
    """Nats between policy and engine after an update."""
    engine, policy = direct.engine, direct.policy
    engine.sleep()
    shake(policy)
    engine.sync(policy)
    engine.wake()
    return largest_difference(policy, PROMPTS, engine.generate(PROMPTS, 2, SAMPLING))


def test_weights_and_cached_keys_that_level_two_drops_come_back_whole(
    direct, dropping, shake, largest_difference, monkeypatch
):
    engine, vllm = direct.engine, direct.engine._vllm
    calls: list[tuple[Any, ...]] = []

    def drop() -> None:
        for parameter in engine._worker.get_model().parameters():  # frozen ones with the others
            parameter.data.fill_(torch.nan)
        for cache in engine._kv_tensors():
            cache.fill_(1e4)  # attention masks what a block does not hold yet by a factor of 0

    def noted(name: str) -> None:
        call = getattr(vllm, name)
        monkeypatch.setattr(
            vllm, name, lambda **given: calls.append((name, *given.values())) or call(**given)
        )

    dropping(drop)
    for name in ("sleep", "wake_up", "reset_prefix_cache"):
        noted(name)

    assert step(direct, shake, largest_difference) < 1e-3
    wakes = [("wake_up", ["weights"]), ("reset_prefix_cache",), ("wake_up", ["kv_cache"])]
    assert calls == [("sleep", 2), *wakes]


def test_a_model_that_level_two_damages_is_repaired_and_put_to_level_one(
    direct, dropping, shake, largest_difference, monkeypatch
):
    dropping(lambda: None)
    direct.engine._rehearse()
    assert direct.engine._cycle.level == 2  # of a model that it leaves whole
    layer, scale = direct.engine._worker.get_model().model.layers[0].mlp, torch.ones(())
    forward = layer.forward
    monkeypatch.setattr(layer, "scale", scale, raising=False)  # a plain attribute
    monkeypatch.setattr(layer, "forward", lambda x: forward(x) * scale)
    dropping(lambda: scale.fill_(torch.nan))
    with pytest.warns(UserWarning, match="does not survive"):
        direct.engine._rehearse()

    assert (direct.engine._cycle.level, scale) == (1, 1)
    assert step(direct, shake, largest_difference) < 1e-3


def test_frozen_weights_are_sent_again_only_when_they_were_dropped(
    direct, dropping, shake, largest_difference
):
    head = direct.engine._worker.get_model().lm_head.weight
    with torch.no_grad():
        head.fill_(7.0)
    step(direct, shake, largest_difference)
    assert (head == 7).all()  # what trains was sent, and the frozen head was not
    dropping(lambda: None)
    assert step(direct, shake, largest_difference) < 1e-3


def test_a_model_that_vllm_computes_differently_is_refused(direct, monkeypatch):
    norm, engine = direct.engine._worker.get_model().model.norm, direct.engine
    # A tenth of the logits and less: at 1, one random model in twenty hardly differs.
    monkeypatch.setattr(norm, "variance_epsilon", 100.0)

    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*rollout\.engine"):
        require_agreement(direct.policy, engine._probe, engine._probe_logprobs())


def test_agreement_is_up_to_rounding_of_the_dtype_and_device_and_never_with_what_is_no_number():
    zeros = torch.zeros(4)
    half, gpu, cpu = (
        SimpleNamespace(dtype=dtype, device=torch.device(device))
        for dtype, device in ((torch.bfloat16, "cpu"), (torch.float32, "cuda"), (torch.float32, "cpu"))
    )
    assert agree(zeros, zeros + 0.1, half) and not agree(zeros, zeros + 0.1, gpu)
    assert agree(zeros, zeros + 0.01, gpu) and not agree(zeros, zeros + 0.01, cpu)
    assert not agree(zeros, torch.tensor([0.0, 0.0, 0.0, torch.nan]), half)


def test_unregistered_tensors_are_plain_attributes_each_memory_once():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].scale = torch.ones(3)
    module[1].tables = {"cos": [torch.ones(4)], "same": module[0].scale[:2]}
    module[1].cache = torch.ones(5)
    module[1].weight_view = module[1].weight.data

    found = unregistered_tensors(module, without={module[1].cache.untyped_storage().data_ptr()})

    assert sorted(tensor.untyped_storage().nbytes() for tensor in found) == [12, 16]


def test_a_tokenizer_that_decodes_differently_is_refused(tokenizer):
    require_same_tokenizer(tokenizer, tokenizer)
    different = SimpleNamespace(decode=lambda ids: "")
    with pytest.raises(ValueError, match=r"SimpleNamespace.*rollout\.stop"):
        require_same_tokenizer(tokenizer, different)
