"""OpenRLHF's actor and policy loss against ours in their place."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_stubs import assert_unchanged_by_patch, with_gradients
from torch import Tensor

from grpo_fast import GRPOLossConfig


@pytest.fixture
def make_actor(host: SimpleNamespace, small_model: Callable[..., Any]) -> Callable[..., Any]:
    def make(family: str = "llama", temperature: float = 1.0, packing: bool = False) -> Any:
        actor = host.actor.Actor(small_model(family, attn_implementation="eager"), temperature=temperature)
        actor.packing_samples = packing
        return actor

    return make


@pytest.fixture
def batch(rng: torch.Generator) -> dict[str, Tensor]:
    """Left-padded prompts, right-padded answers of at most 5 tokens."""
    positions, starts, ends = torch.arange(10), torch.tensor([[0], [2], [1]]), torch.tensor([[10], [8], [9]])
    attention = (positions >= starts) & (positions < ends)
    ids = torch.randint(0, 53, (3, 10), generator=rng)
    return {"sequences": ids, "attention_mask": attention.long(), "action_mask": attention[:, 5:]}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("family", "temperature"), [("llama", 1.0), ("llama", 0.7), ("gemma2", 1.3)])
def test_log_probabilities_entropies_and_gradients_are_the_hosts(
    host, batch, make_actor, family, temperature, packing
):
    actor = make_actor(family, temperature, packing)

    def evaluate() -> list[Tensor]:
        logprobs, output = actor(**batch, return_output=True, return_entropy=True)
        entropy = output.entropy[:, -logprobs.shape[1] :] * batch["action_mask"]
        return with_gradients([logprobs, entropy], actor.parameters())

    assert_unchanged_by_patch(host, evaluate, rtol=1e-4, atol=2e-5)
    _, output = actor(**batch, return_output=True)
    assert output.logits.shape[-1] == 1  # a score of each token, and no logits


@pytest.mark.parametrize("wanted", ["return_logprobs", "return_output"])
def test_whole_sequences_log_probabilities_and_logits_are_the_hosts(host, batch, make_actor, wanted):
    actor = make_actor(temperature=0.9)
    del batch["action_mask"]

    def evaluate() -> Tensor:
        result = actor(**batch, **{wanted: True})
        return result.logits if wanted == "return_output" else result

    assert_unchanged_by_patch(host, evaluate, rtol=1e-4, atol=2e-5)


LOSSES = {
    "ppo": ({}, GRPOLossConfig("dapo", epsilon_low=0.2, epsilon_high=0.2)),
    "sample mean": ({"token_level_loss": False}, GRPOLossConfig("grpo", epsilon_low=0.2)),
    "dual clip": (
        {"clip_eps_high": 0.28, "dual_clip": 3.0},
        GRPOLossConfig("dapo", epsilon_low=0.2, epsilon_high=0.28, delta=3.0),
    ),
    "gspo": (
        {"policy_loss_type": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4},
        GRPOLossConfig("gspo"),
    ),
    **{
        f"{mode} of the sampler's ratio": (
            {"is_correction_level": "token", "is_correction_mode": mode},
            GRPOLossConfig("dapo", sampler_correction=ours, sampler_clip_min=0.5, sampler_clip_max=5),
        )
        for mode, ours in (("clip", "token_truncate"), ("mask", "token_mask"))
    },
}
STEP = {"dp_size": 2, "batch_num_tokens": 57.0, "global_batch_size": 8.0}


@pytest.mark.parametrize("step", [{}, STEP], ids=["own counts", "two ranks"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_policy_loss_is_the_hosts(host, padded, name, step):
    options, config = LOSSES[name]
    module, theirs = host.loss.PolicyLoss(**options), host.loss.PolicyLoss.forward

    def evaluate() -> list[Tensor]:
        batch = padded.new, padded.old, padded.advantages, padded.mask, padded.sampler
        loss, *metrics = module(*batch, **step)
        if name == "gspo":  # theirs counts tokens and every crossing, ours sequences that the clip acts on
            metrics = []
        return [loss, *torch.autograd.grad(loss, padded.new), *metrics]

    assert_unchanged_by_patch(host, evaluate, config, rtol=1e-6, atol=1e-6, check_dtype=False)
    host.adapter.patch()
    assert host.loss.PolicyLoss.forward is theirs


@pytest.mark.parametrize("term", ["beta", "entropy_coef"])
def test_terms_that_openrlhf_adds_itself_are_refused(host, term):
    with pytest.raises(ValueError, match=term):
        host.adapter.patch(GRPOLossConfig("dapo", **{term: 0.1}))
