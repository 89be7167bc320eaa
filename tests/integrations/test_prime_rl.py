"""prime-rl's losses and fused output layers against ours in their place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_stubs import assert_unchanged_by_patch, with_gradients
from torch import Tensor


def inputs_of(host: SimpleNamespace, rng: torch.Generator, **changes: Any) -> Any:
    sampler = -torch.rand(12, generator=rng) * 3
    values = {
        "trainer_logprobs": (sampler + 0.5 * torch.randn(12, generator=rng)).clamp(max=0).requires_grad_(),
        "inference_logprobs": sampler,
        "ref_logprobs": None,
        "advantages": torch.randn(12, generator=rng),
        "loss_mask": torch.rand(12, generator=rng) < 0.7,
    }
    return host.loss.LossInputs(**values | changes)


@pytest.mark.parametrize("weighted", [False, True])
def test_dppo_has_the_gradient_of_the_hosts_default_loss(host, rng, weighted):
    inputs = inputs_of(host, rng, loss_weights=torch.rand(12, generator=rng) if weighted else None)
    settings = SimpleNamespace(dppo_mask_low=0.15, dppo_mask_high=0.1, adv_tau=1.0, kl_tau=0.0)
    theirs = host.loss.default_loss_fn(inputs, settings)

    ours = host.adapter.policy_loss(inputs, loss_type="dppo_tv", epsilon_low=0.15, epsilon_high=0.1)

    assert isinstance(ours, host.loss.LossOutputs)
    found, expected = (torch.autograd.grad(of.loss, inputs.trainer_logprobs) for of in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_clipped_loss_is_a_sum_that_the_host_divides_by_the_steps_tokens(host, rng):
    samples = [inputs_of(host, rng) for _ in range(3)]
    names = "trainer_logprobs", "inference_logprobs", "advantages", "loss_mask"
    columns = {name: [getattr(sample, name) for sample in samples] for name in names}

    loss, metrics = host.loss.compute_loss(
        **columns,
        **dict.fromkeys(("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")),
        rl_loss_fn=lambda inputs: host.adapter.policy_loss(inputs, loss_type="dapo", epsilon_high=0.28),
        rl_scale=int(torch.cat(columns["loss_mask"]).sum()),
        ce_scale=1,
        ref_kl_scale=1,
    )

    trained, sampled, advantages, mask = (torch.cat(columns[name]) for name in names)
    ratio = (trained - sampled).exp()
    terms = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)[mask]
    torch.testing.assert_close(loss, -terms.mean(), rtol=1e-5, atol=1e-6)
    assert metrics["policy/ratio_mean"].shape == (3,)


@pytest.mark.parametrize(
    "options",
    [{"loss_type": "grpo"}, {"sampler_correction": "token_mask"}, {"entropy_coef": 0.1}, {"beta": 0.1}],
)
def test_what_the_host_cannot_serve_is_refused(host, rng, options):
    inputs = inputs_of(host, rng, loss_weights=torch.ones(12), ref_logprobs=torch.zeros(12))
    with pytest.raises(ValueError, match=next(iter(options))):
        host.adapter.policy_loss(inputs, **options)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_fused_output_layer_is_the_hosts(host, rng, softcap):
    if softcap is None:
        layer = host.lm_head.FusedOutputLinear(16, 53, chunk_size=5)
    else:
        layer = host.lm_head_gemma.GemmaFusedOutputLinear(16, 53, chunk_size=5, softcap=softcap)
    hidden = torch.randn(2, 7, 16, generator=rng, requires_grad=True)
    labels = torch.randint(0, 53, (2, 7), generator=rng)
    temperature = 0.5 + torch.rand(2, 7, generator=rng)

    def evaluate() -> list[Tensor]:
        out = layer(hidden, labels, temperature=temperature)
        return [out["entropy"], *with_gradients([out["logprobs"]], [hidden, layer.weight])]

    assert_unchanged_by_patch(host, evaluate, rtol=1e-4, atol=1e-5)
