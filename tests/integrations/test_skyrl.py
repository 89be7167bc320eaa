"""SkyRL's model wrapper and policy losses against ours in their place."""

from __future__ import annotations

import functools

import pytest
import torch
from host_stubs import assert_unchanged_by_patch, with_gradients
from torch import Tensor


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_log_probabilities_entropies_and_gradients_are_the_hosts(
    host, small_model, rng, monkeypatch, family, sliced
):
    model = host.model_wrapper.HFModelWrapper(small_model(family, attn_implementation="eager"))
    sequences = torch.randint(2, 53, (3, 8), generator=rng)
    mask = torch.ones_like(sequences)
    mask[1, :3] = 0
    if sliced:  # as on the second of two ranks: both its tokens and the tokens that they predict
        monkeypatch.setattr(model, "sequence_parallel_size", 2)

        def second_half(*tensors, **_):
            return *(None if tensor is None else tensor[:, 4:] for tensor in tensors[:3]), 0

        monkeypatch.setattr(host.model_wrapper, "ulysses_pad_and_slice_inputs", second_half)
        monkeypatch.setattr(
            host.model_wrapper, "gather_outputs_and_unpad", lambda x, **_: torch.cat((x.detach() * 0, x), -1)
        )

    def evaluate() -> list[Tensor]:
        options = {"temperature": 0.7, "return_output": True, "compute_entropy": True}
        logprobs, output = model(sequences, 5, mask, **options)
        return with_gradients([logprobs, output["entropy"][:, -6:-1]], model.parameters())

    assert_unchanged_by_patch(host, evaluate, rtol=1e-4, atol=1e-5)
    shapes = []
    head = model.model.get_output_embeddings()
    with head.register_forward_hook(lambda _, inputs, output: shapes.append(output.shape[-1])):
        evaluate()
    assert shapes != [53]


@pytest.mark.parametrize(
    ("ours", "theirs"), [("dapo", "regular"), ("gspo_token", "gspo"), ("sapo", "sapo"), ("cispo", "cispo")]
)
def test_a_registered_loss_is_the_hosts_loss_with_its_constants(host, padded, ours, theirs):
    registry = host.ppo_utils.PolicyLossRegistry
    before = registry.list_available()
    host.adapter.patch()
    config = host.config.AlgorithmConfig(policy_loss_type=theirs, eps_clip_low=0.1, eps_clip_high=0.3)
    config.off_policy_correction.tis_ratio_type = "token"
    config.off_policy_correction.token_tis_ratio_clip_high = 1.1

    def evaluate(name: str) -> tuple[Tensor, Tensor]:
        options = {"loss_mask": padded.mask.double(), "rollout_logprobs": padded.sampler}
        batch = padded.new, padded.old, padded.advantages
        loss, metrics = registry.get(name)(*batch, config=config, **options)
        assert "clip_ratio" in metrics or theirs == "sapo"
        return loss, torch.autograd.grad(loss, padded.new)[0]

    torch.testing.assert_close(evaluate(f"grpo_fast_{ours}"), evaluate(theirs), rtol=1e-5, atol=1e-7)
    host.adapter.unpatch()
    assert registry.list_available() == before


def test_every_registered_loss_is_proportional_to_the_advantages(host, padded):
    for name in host.adapter.LOSS_TYPES:
        options = {"config": host.config.AlgorithmConfig(), "loss_mask": padded.mask}
        loss = functools.partial(host.adapter.policy_loss, name, padded.new, padded.old, **options)
        scale = torch.rand(4, 1, dtype=torch.float64) + 0.1
        parts = [loss(padded.advantages * one)[0] for one in torch.eye(4, dtype=torch.float64)[..., None]]
        whole = (scale[:, 0] * torch.stack(parts)).sum()
        torch.testing.assert_close(loss(padded.advantages * scale)[0], whole, msg=name)
