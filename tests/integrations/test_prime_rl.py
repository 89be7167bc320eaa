"""prime-rl's losses and fused output layers against ours in their place.

The real prime-rl source runs here: installed, or a checkout in the folder that the environment variable
GRPO_FAST_PEER_SOURCES names, and with it three small packages. No package registry has it. What torchtitan
and the like offer is stubbed where they are not installed, and its list of models is not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_stubs import importable, use_checkout
from torch import Tensor

use_checkout("prime_rl", "src", "packages/prime-rl-configs/src")
if any(find_spec(name) is None for name in ("prime_rl", "jaxtyping", "beartype", "pydantic_config")):
    pytest.skip(
        "prime_rl is not importable: pip install jaxtyping beartype prime-pydantic-config, and set "
        "GRPO_FAST_PEER_SOURCES to a folder with a checkout prime_rl",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def host() -> Iterator[SimpleNamespace]:
    with importable("prime_rl"):
        from prime_rl.trainer.models.layers import lm_head, lm_head_gemma
        from prime_rl.trainer.rl import loss

        from grpo_fast.integrations import prime_rl as adapter

        yield SimpleNamespace(loss=loss, head=lm_head, gemma=lm_head_gemma, adapter=adapter)


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
    weights = torch.rand(12, generator=rng) if weighted else None
    inputs = inputs_of(host, rng, loss_weights=weights)
    settings = SimpleNamespace(dppo_mask_low=0.15, dppo_mask_high=0.1, adv_tau=1.0, kl_tau=0.0)
    (expected,) = torch.autograd.grad(
        host.loss.default_loss_fn(inputs, settings).loss, inputs.trainer_logprobs
    )

    ours = host.adapter.policy_loss(inputs, loss_type="dppo_tv", epsilon_low=0.15, epsilon_high=0.1)

    assert isinstance(ours, host.loss.LossOutputs)
    (found,) = torch.autograd.grad(ours.loss, inputs.trainer_logprobs)
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
    ("options", "named"),
    [
        ({"loss_type": "grpo"}, "loss_type"),
        ({"sampler_correction": "token_mask"}, "sampler_correction"),
        ({"entropy_coef": 0.1}, "entropy_coef"),
        ({"beta": 0.1}, "beta"),
    ],
)
def test_what_the_host_cannot_serve_is_refused(host, rng, options, named):
    inputs = inputs_of(host, rng, loss_weights=torch.ones(12), ref_logprobs=torch.zeros(12))
    with pytest.raises(ValueError, match=named):
        host.adapter.policy_loss(inputs, **options)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_fused_output_layer_is_the_hosts(host, rng, softcap):
    if softcap is None:
        layer = host.head.FusedOutputLinear(16, 53, chunk_size=5)
    else:
        layer = host.gemma.GemmaFusedOutputLinear(16, 53, chunk_size=5, softcap=softcap)
    hidden = torch.randn(2, 7, 16, generator=rng, requires_grad=True)
    labels = torch.randint(0, 53, (2, 7), generator=rng)
    temperature = 0.5 + torch.rand(2, 7, generator=rng)

    def evaluate() -> list[Tensor]:
        out = layer(hidden, labels, temperature=temperature)
        loss = (torch.linspace(-1, 2, 14) * out["logprobs"].flatten()).sum()
        return [out["logprobs"], out["entropy"], *torch.autograd.grad(loss, (hidden, layer.weight))]

    expected = evaluate()
    host.adapter.patch()
    torch.testing.assert_close(evaluate(), expected, rtol=1e-4, atol=1e-5)


def test_unpatching_restores_the_layers(host):
    layers = host.head.FusedOutputLinear, host.gemma.GemmaFusedOutputLinear
    before = [layer.forward for layer in layers]
    host.adapter.patch()
    host.adapter.patch()
    assert [layer.forward for layer in layers] != before
    host.adapter.unpatch()
    assert [layer.forward for layer in layers] == before


def test_the_example_runs_as_it_stands(host, run_example):
    names, _ = run_example("prime_rl_loss")
    assert names["loss"](names["sample"]).loss.isfinite()
