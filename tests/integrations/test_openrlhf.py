"""OpenRLHF's actor and policy loss against ours in their place.

The real OpenRLHF source runs here (it must be importable); DeepSpeed, flash-attn and Ray are stubbed where
they are not installed, and flash-attn's padding helpers are written out in torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_stubs import importable
from torch import Tensor

from grpo_fast import GRPOLossConfig

if find_spec("openrlhf") is None:
    pytest.skip("openrlhf is not importable", allow_module_level=True)


def unpad_input(padded: Tensor, mask: Tensor) -> tuple[Any, ...]:
    index = mask.flatten().nonzero().squeeze(1)
    return padded.flatten(0, 1)[index], index, mask.sum(1).cumsum(0), int(mask.sum(1).max()), None


def pad_input(rows: Tensor, index: Tensor, batch: int, length: int) -> Tensor:
    flat = rows.new_zeros(batch * length, *rows.shape[1:]).index_copy(0, index, rows)
    return flat.view(batch, length, *rows.shape[1:])


@pytest.fixture(scope="module")
def host() -> Iterator[SimpleNamespace]:
    # compute_entropy is compiled at import; it runs eagerly here.
    with importable("openrlhf") as absent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function=None, **_: function or (lambda f: f))
        if "flash_attn" in absent:
            import flash_attn.bert_padding as padding

            padding.unpad_input, padding.pad_input = unpad_input, pad_input
            padding.index_first_axis = lambda rows, index: rows[index]
            padding.rearrange = lambda rows, _: rows.flatten(0, 1)
            # No kernel: OpenRLHF then takes its own torch path.
            patch.setitem(sys.modules, "flash_attn.ops", None)
        from openrlhf.models import actor, loss

        from grpo_fast.integrations import openrlhf as adapter

        yield SimpleNamespace(actor=actor, loss=loss, adapter=adapter)


@pytest.fixture
def make_actor(host: SimpleNamespace, small_model: Callable[..., Any]) -> Callable[..., Any]:
    def make(family: str = "llama", temperature: float = 1.0, packing: bool = False) -> Any:
        capped = {"head_dim": 8, "final_logit_softcapping": 2.0} if family == "gemma2" else {}
        model = small_model(family, attn_implementation="eager", **capped)
        actor = host.actor.Actor(model, temperature=temperature)
        actor.packing_samples = packing
        return actor

    return make


def outputs(actor: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Log-probabilities, entropies, and gradients through both."""
    actor.zero_grad()
    logprobs, output = actor(**batch, return_output=True, return_entropy=True)
    length = logprobs.shape[1]
    scale = torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)
    live = batch["action_mask"]
    (0.3 * output.entropy[:, -length:] * live + scale * logprobs).sum().backward()
    gradients = {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}
    return {"logprobs": logprobs.detach(), "entropy": output.entropy.detach()[:, -length:] * live} | gradients


def batch_of(rng: torch.Generator) -> dict[str, Tensor]:
    """Left-padded prompts, right-padded answers of at most 5 tokens."""
    positions, starts, ends = torch.arange(10), torch.tensor([[0], [2], [1]]), torch.tensor([[10], [8], [9]])
    attention = (positions >= starts) & (positions < ends)
    return {
        "sequences": torch.randint(0, 53, (3, 10), generator=rng),
        "attention_mask": attention.long(),
        "action_mask": attention[:, 5:],
    }


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("family", "temperature"), [("llama", 1.0), ("llama", 0.7), ("gemma2", 1.3)])
def test_log_probabilities_entropies_and_gradients_are_the_hosts(
    host, rng, make_actor, family, temperature, packing
):
    actor, batch = make_actor(family, temperature, packing), batch_of(rng)
    expected = outputs(actor, batch)

    host.adapter.patch()
    found = outputs(actor, batch)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    _, output = actor(**batch, return_output=True)
    assert output.logits.shape[-1] == 1  # a score of each token, and no logits


@pytest.mark.parametrize("wanted", ["return_logprobs", "return_output"])
def test_whole_sequences_log_probabilities_and_logits_are_the_hosts(host, rng, make_actor, wanted):
    actor, batch = make_actor(temperature=0.9), batch_of(rng)
    del batch["action_mask"]

    def evaluate() -> Tensor:
        result = actor(**batch, **{wanted: True})
        return result.logits if wanted == "return_output" else result

    expected = evaluate()
    host.adapter.patch()
    torch.testing.assert_close(evaluate(), expected, rtol=1e-4, atol=2e-5)


def test_unpatching_restores_everything(host):
    before = (dict(vars(host.actor)), host.actor.Actor.forward, host.loss.PolicyLoss.forward)
    host.adapter.patch(GRPOLossConfig("dapo"))
    host.adapter.patch()
    assert host.loss.PolicyLoss.forward is before[2]
    host.adapter.unpatch()
    assert (dict(vars(host.actor)), host.actor.Actor.forward, host.loss.PolicyLoss.forward) == before


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
    module, batch = host.loss.PolicyLoss(**options), padded

    def evaluate() -> tuple[Tensor, ...]:
        loss, *metrics = module(batch.new, batch.old, batch.advantages, batch.mask, batch.sampler, **step)
        return (loss, torch.autograd.grad(loss, batch.new)[0], *metrics)

    expected = evaluate()
    host.adapter.patch(config)
    found = evaluate()

    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    if name != "gspo":  # theirs counts tokens and every crossing, ours sequences that the clip acts on
        torch.testing.assert_close(found[2:], expected[2:], check_dtype=False, rtol=1e-5, atol=1e-6)


def test_terms_that_openrlhf_adds_itself_are_refused(host):
    for term in ("beta", "entropy_coef"):
        with pytest.raises(ValueError, match=term):
            host.adapter.patch(GRPOLossConfig("dapo", **{term: 0.1}))


def test_the_example_runs_as_it_stands(host, run_example):
    names, _ = run_example("openrlhf_actor")
    assert names["logprobs"].shape == (2, 6) and names["model"].lm_head.weight.grad.any()
