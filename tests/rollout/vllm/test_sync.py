"""Weights into a real vLLM in every way there is: after each, it computes what the policy computes."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_fast.policy import Policy
from grpo_fast.policy.config import LoraConfig
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.vllm.layout import Landing, watch_loading
from grpo_fast.rollout.vllm.sync import MergedSync, checkpoint_weights

SAMPLING = Sampling(max_completion_length=20, seed=11)
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12), tuple(3 + i % 26 for i in range(140))]
# Nats. float32: two orders of summation, of weights that have been shaken three times: 1.1e-3 was seen.
# bfloat16: 8 bits in each of some 10 roundings on the way to logits of size 10 or so. An older set of
# weights, or a mixture of two, is nats away.
ROUNDING = {"float32": 1e-2, "bfloat16": 0.3}


def through_a_cycle(engine: Any, policy: Policy) -> None:
    engine.sleep()
    engine.sync(policy)
    engine.wake()


LORA = LoraConfig(r=4, alpha=16.0)
WAYS = {
    "packed": ("portable", {"dtype": "bfloat16", "plain": False}),
    "packed, untied": ("portable", {"dtype": "float32", "plain": False, "tied": False}),
    "plain": ("direct", {"dtype": "bfloat16", "plain": True}),
    "shared": ("shared", {"dtype": "float32", "plain": True, "share_weights": True}),
    "lora merged": ("direct", {"dtype": "float32", "plain": True, "lora": LORA}),
    "lora adapter": ("adapter", {"dtype": "float32", "plain": False, "lora": LORA, "lora_sync": "adapter"}),
}


@pytest.mark.parametrize("name", WAYS)
def test_after_every_sync_it_computes_what_the_policy_computes(
    name, served_folder, running_vllm, shake, largest_difference
):
    way, options = WAYS[name]
    options = dict(options)
    folder, noise = served_folder(tied=options.pop("tied", True)), ROUNDING[options["dtype"]]
    with running_vllm(folder, **options) as (engine, policy):
        assert engine.sync_way == way, engine.sync_reason
        before = engine.generate(PROMPTS, 3, SAMPLING)
        assert largest_difference(policy, PROMPTS, before) < noise
        for _ in range(3):
            shake(policy, 0.2 if policy.has_adapters else 0.05)
            through_a_cycle(engine, policy)
            after = engine.generate(PROMPTS, 3, SAMPLING)
            assert largest_difference(policy, PROMPTS, after) < noise
        assert largest_difference(policy, PROMPTS, before) > 2 * noise
        if way == "shared":
            weights = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
            assert engine.memory()["weights"] < sum(p.numel() for p in weights.values()) * 4
    if way == "shared":  # they outlive the engine
        assert all(torch.equal(p, weights[name]) for name, p in policy.model.named_parameters())


def test_frozen_weights_are_sent_again_only_when_they_were_dropped(
    served_folder, running_vllm, shake, monkeypatch
):
    sent: list[str] = []
    load = Landing.load
    monkeypatch.setattr(Landing, "load", lambda self, weight: sent.append(self.name) or load(self, weight))
    folder, options = served_folder(tied=False), {"dtype": "float32", "plain": True, "head": False}
    with running_vllm(folder, **options) as (engine, policy):
        shake(policy)
        sent.clear()
        through_a_cycle(engine, policy)
        assert set(sent) == set(policy.trainable())
        assert "lm_head.weight" not in sent

        sent.clear()
        engine.sleep()
        monkeypatch.setattr(engine._cycle, "weights_dropped", True)
        engine.sync(policy)
        engine.wake()
        assert set(sent) == {name for name, _ in policy.named_weights()}


def test_sharing_that_the_layout_forbids_is_refused_with_the_reason_and_leaves_room_for_another(
    served_folder, running_vllm
):
    options = {"dtype": "float32", "plain": False}
    folder = served_folder()
    with pytest.raises(ValueError, match=r"share_weights = true: .* is repacked after loading"):
        running_vllm(folder, **options, share_weights=True).__enter__()

    with running_vllm(folder, **options) as (engine, _):
        assert engine.generate(PROMPTS, 1, SAMPLING)


def test_a_float32_head_gives_float32_logits_of_bfloat16_hidden_states(
    served_folder, running_vllm, rng, largest_difference
):
    with running_vllm(served_folder(), dtype="bfloat16", plain=False, fp32_head=True) as (engine, policy):
        hidden = torch.randn(3, policy.head.weight.shape[1], generator=rng).bfloat16()
        with torch.no_grad():
            logits = engine._running().model.compute_logits(hidden)

        torch.testing.assert_close(logits, policy.head.logits(hidden))
        groups = engine.generate(PROMPTS, 3, SAMPLING)
        assert largest_difference(policy, PROMPTS, groups) < ROUNDING["bfloat16"]


class Plain(nn.Module):
    """A model of one weight, in an engine whose reload may put it elsewhere or derive others from it."""

    def __init__(self, *, latent: bool = False, moves: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.model_config = SimpleNamespace(use_mla=latent)
        self._moves = moves

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            self.weight.data.copy_(weight)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        if self._moves:
            self.weight.data = self.weight.data.clone()
        self.load_weights(kwargs["weights_iterator"])


@pytest.mark.parametrize(
    ("engine", "way", "reason"),
    [
        (Plain(), "direct", "memory of its own"),
        (Plain(latent=True), "portable", "derives other weights"),
        (Plain(moves=True), "portable", "reload moves the weights"),
    ],
    ids=["plain", "latent attention", "moving"],
)
def test_copies_are_made_only_where_they_reach_everything_that_is_read(engine, way, reason):
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    policy = SimpleNamespace(
        base_model=nn.Module(),
        named_weights=lambda: iter([("weight", weight.detach())]),
        trainable=lambda: {"weight": weight},
    )
    landings = watch_loading(engine.load_weights, policy.named_weights())

    sync = MergedSync(engine, engine, policy, landings)
    with torch.no_grad():
        weight += 1
    sync(policy, everything=False)

    assert (sync.way, reason in sync.reason) == (way, True)
    assert torch.equal(engine.weight, weight)


def test_experts_are_sent_one_by_one_under_the_names_of_a_checkpoint(tmp_path, seed):
    small = {"num_experts": 3, "moe_intermediate_size": 8, "head_dim": 4, "hidden_size": 16, "vocab_size": 20}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=1, intermediate_size=8, **small))
    policy = SimpleNamespace(base_model=model, named_weights=lambda: iter(model.state_dict().items()))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")

    sent = dict(checkpoint_weights(policy))

    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], weight) for name, weight in saved.items())
