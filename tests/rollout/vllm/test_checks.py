from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

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
def direct(served_folder, running_vllm) -> Iterator[SimpleNamespace]:
    """An engine that lies in memory as on a GPU."""
    with running_vllm(served_folder(), dtype="float32", plain=True) as (engine, policy):
        yield SimpleNamespace(engine=engine, policy=policy)


def test_a_model_that_level_two_leaves_whole_stays_there(direct, monkeypatch):
    monkeypatch.setattr(direct.engine._cycle, "level", 2)
    direct.engine._rehearse()

    assert direct.engine._cycle.level == 2
    assert direct.engine.generate(PROMPTS, 1, SAMPLING)


def test_weights_and_cached_keys_that_level_two_drops_come_back_whole(
    direct, shake, largest_difference, monkeypatch
):
    """The CPU drops nothing, so the test does, and frozen weights with the others."""
    engine, policy, vllm = direct.engine, direct.policy, direct.engine._vllm
    sleep, calls = vllm.sleep, []

    def dropping(level: int) -> None:
        sleep(level=level)
        for parameter in engine._running().model.parameters():
            parameter.data.fill_(torch.nan)
        for cache in engine._kv_tensors():
            cache.fill_(1e4)  # attention masks what a block does not hold yet by a factor of 0

    def noted(name: str) -> None:
        call = getattr(vllm, name)
        monkeypatch.setattr(
            vllm, name, lambda **given: calls.append((name, *given.values())) or call(**given)
        )

    monkeypatch.setattr(vllm, "sleep", dropping)
    for name in ("sleep", "wake_up", "reset_prefix_cache"):
        noted(name)
    monkeypatch.setattr(engine._cycle, "level", 2)
    engine.sleep()
    shake(policy)
    engine.sync(policy)
    engine.wake()

    assert largest_difference(policy, PROMPTS, engine.generate(PROMPTS, 2, SAMPLING)) < 1e-3
    wakes = [("wake_up", ["weights"]), ("reset_prefix_cache",), ("wake_up", ["kv_cache"])]
    assert calls == [("sleep", 2), *wakes]


def test_a_model_that_level_two_damages_is_repaired_and_put_to_level_one(
    direct, shake, largest_difference, monkeypatch
):
    """The CPU drops nothing, so the test does: a scale that the model keeps as a plain attribute."""
    engine, policy, vllm = direct.engine, direct.policy, direct.engine._vllm
    layer = engine._running().model.model.layers[0].mlp
    scale, forward, sleep = torch.ones(()), layer.forward, vllm.sleep

    def dropping(level: int) -> None:
        sleep(level=level)
        if level == 2:
            scale.fill_(torch.nan)

    monkeypatch.setattr(layer, "scale", scale, raising=False)
    monkeypatch.setattr(layer, "forward", lambda x: forward(x) * scale)
    monkeypatch.setattr(vllm, "sleep", dropping)
    monkeypatch.setattr(engine._cycle, "level", 2)
    with pytest.warns(UserWarning, match="does not survive"):
        engine._rehearse()

    assert engine._cycle.level == 1
    assert scale == 1
    shake(policy)
    engine.sleep()
    engine.sync(policy)
    engine.wake()
    assert largest_difference(policy, PROMPTS, engine.generate(PROMPTS, 2, SAMPLING)) < 1e-3


def test_a_model_that_vllm_computes_differently_is_refused(direct, monkeypatch):
    norm = direct.engine._running().model.model.norm
    # A tenth of the logits and less: at 1, one random model in twenty hardly differs.
    monkeypatch.setattr(norm, "variance_epsilon", 100.0)

    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*rollout\.engine"):
        require_agreement(direct.policy, direct.engine._probe_tokens(), direct.engine._probe())


def test_agreement_is_up_to_rounding_of_the_dtype_and_never_with_what_is_no_number():
    zeros = torch.zeros(4)

    assert agree(zeros, zeros + 0.1, torch.bfloat16)
    assert not agree(zeros, zeros + 0.1, torch.float32)
    assert not agree(zeros, torch.tensor([0.0, 0.0, 0.0, torch.nan]), torch.bfloat16)


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
