"""SkyRL's model wrapper and policy losses against ours in their place.

The real SkyRL source runs here, installed or from a checkout `skyrl`. Ray and flash-attn are stubbed where
they are not installed, and flash-attn's padding helpers are written out in torch.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import typing_extensions
from host_stubs import importable, use_checkout
from torch import Tensor

use_checkout("skyrl", ".", "skyrl-gym")
if any(find_spec(name) is None for name in ("skyrl", "skyrl_gym", "jaxtyping", "loguru")):
    pytest.skip(
        "skyrl is not importable: pip install jaxtyping loguru cloudpathlib skyrl-gym, and set "
        "GRPO_FAST_PEER_SOURCES to a folder with a checkout skyrl",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def host() -> Iterator[SimpleNamespace]:
    with importable("skyrl"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)  # which pydantic wants before 3.12
        from skyrl.backends.skyrl_train.utils import ppo_utils
        from skyrl.backends.skyrl_train.workers import model_wrapper
        from skyrl.train.config import AlgorithmConfig

        patch.setattr(ppo_utils.ray, "is_initialized", lambda: False)
        from grpo_fast.integrations import skyrl as adapter

        adapter.unpatch()  # which an import has done
        yield SimpleNamespace(
            losses=ppo_utils, wrapper=model_wrapper, config=AlgorithmConfig, adapter=adapter
        )


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_log_probabilities_entropies_and_gradients_are_the_hosts(
    host, small_model, rng, monkeypatch, family, sliced
):
    capped = {"head_dim": 8, "final_logit_softcapping": 2.0} if family == "gemma2" else {}
    model = host.wrapper.HFModelWrapper(small_model(family, attn_implementation="eager", **capped))
    sequences = torch.randint(2, 53, (3, 8), generator=rng)
    mask = torch.ones_like(sequences)
    mask[1, :3] = 0
    weights = torch.randn(2, 3, 5, generator=rng)
    if sliced:  # as on the second of two ranks: both its tokens and the tokens that they predict
        monkeypatch.setattr(model, "sequence_parallel_size", 2)

        def second_half(*tensors, **_):
            return *(None if tensor is None else tensor[:, 4:] for tensor in tensors[:3]), 0

        monkeypatch.setattr(host.wrapper, "ulysses_pad_and_slice_inputs", second_half)
        monkeypatch.setattr(
            host.wrapper, "gather_outputs_and_unpad", lambda x, **_: torch.cat((x.detach() * 0, x), -1)
        )

    def evaluate() -> list[Tensor]:
        logprobs, output = model(
            sequences, 5, mask, temperature=0.7, return_output=True, compute_entropy=True
        )
        entropy = output["entropy"][:, -6:-1]
        loss = (weights[0] * logprobs).sum() + (weights[1] * entropy).sum()
        return [logprobs, entropy, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = evaluate()
    host.adapter.patch()
    found = evaluate()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    shapes = []
    head = model.model.get_output_embeddings()
    with head.register_forward_hook(lambda _, inputs, output: shapes.append(output.shape[-1])):
        evaluate()
    assert shapes != [53]


@pytest.mark.parametrize(
    ("ours", "theirs"), [("dapo", "regular"), ("gspo_token", "gspo"), ("sapo", "sapo"), ("cispo", "cispo")]
)
def test_a_registered_loss_is_the_hosts_loss_with_its_constants(host, padded, ours, theirs):
    host.adapter.patch()
    config = host.config(policy_loss_type=theirs, eps_clip_low=0.1, eps_clip_high=0.3)
    config.off_policy_correction.tis_ratio_type = "token"
    config.off_policy_correction.token_tis_ratio_clip_high = 1.1

    def evaluate(name: str) -> tuple[Tensor, Tensor]:
        loss, metrics = host.losses.PolicyLossRegistry.get(name)(
            padded.new,
            padded.old,
            padded.advantages,
            config=config,
            loss_mask=padded.mask.double(),
            rollout_logprobs=padded.sampler,
        )
        assert "clip_ratio" in metrics or theirs == "sapo"
        return loss, torch.autograd.grad(loss, padded.new)[0]

    torch.testing.assert_close(evaluate(f"grpo_fast_{ours}"), evaluate(theirs), rtol=1e-5, atol=1e-7)


def test_every_registered_loss_is_proportional_to_the_advantages(host, padded):
    for name in host.adapter.LOSS_TYPES:
        options = {"config": host.config(), "loss_mask": padded.mask}
        loss = functools.partial(host.adapter.policy_loss, name, padded.new, padded.old, **options)
        scale = torch.rand(4, 1, dtype=torch.float64) + 0.1
        parts = [loss(padded.advantages * one)[0] for one in torch.eye(4, dtype=torch.float64)[..., None]]
        whole = (scale[:, 0] * torch.stack(parts)).sum()
        torch.testing.assert_close(loss(padded.advantages * scale)[0], whole, msg=name)


def test_unpatching_restores_the_host(host):
    before = host.wrapper.HFModelWrapper.forward, host.losses.PolicyLossRegistry.list_available()
    host.adapter.patch()
    host.adapter.patch()
    assert "grpo_fast_gspo" in host.losses.PolicyLossRegistry.list_available()
    host.adapter.unpatch()
    assert (host.wrapper.HFModelWrapper.forward, host.losses.PolicyLossRegistry.list_available()) == before
