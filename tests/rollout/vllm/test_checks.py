"""What the engine checks of vLLM at its start, and what sleep level 2 may drop, on one engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.rollout import Sampling
from grpo_fast.rollout.vllm.convert import require_same_tokenizer

SAMPLING = Sampling(max_completion_length=20, seed=11)
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12)]


@pytest.fixture(scope="module")
def direct(saved_model, running_vllm) -> Iterator[SimpleNamespace]:
    """An engine that lies in memory as on a GPU, its head frozen."""
    options = {"dtype": "float32", "share_weights": False, "head": False}
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
        for cache in engine._worker.model_runner.kv_caches:
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
    for level, remedy in ((1, r"set rollout\.engine"), (2, r"set rollout\.vllm\.sleep_level to 1, or")):
        monkeypatch.setattr(engine._cycle, "level", level)
        with pytest.raises(ValueError, match=rf"LlamaForCausalLM.*{remedy}"):
            engine._require_agreement()


def test_a_tokenizer_that_decodes_differently_is_refused(tokenizer):
    require_same_tokenizer(tokenizer, tokenizer)
    different = SimpleNamespace(decode=lambda ids: "")
    with pytest.raises(ValueError, match=r"SimpleNamespace.*rollout\.stop"):
        require_same_tokenizer(tokenizer, different)
