from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig

from grpo_fast.policy import Policy
from grpo_fast.policy.verify import check_layer_types, verify_policy


def test_a_model_that_loses_the_layout_on_the_way_is_refused(load: Callable[..., Policy]) -> None:
    policy = load("llama")
    layer = policy.model.model.layers[0]
    forward = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, packed_layout=None, **kwargs: forward(*args, **kwargs)

    with pytest.raises(ValueError, match="packed logits of LlamaForCausalLM differ"):
        verify_policy(policy)


def test_a_model_that_ignores_positions_is_refused(load: Callable[..., Policy]) -> None:
    policy = load("llama")
    rotary = policy.model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])

    with pytest.raises(ValueError, match="differ from the model's own"):
        verify_policy(policy)


def test_a_head_with_an_unknown_scale_is_refused(load: Callable[..., Policy]) -> None:
    policy = load("granite")
    policy.model.config.model_type = "hyperclovax"

    with pytest.raises(ValueError, match="differ from the model's own"):
        verify_policy(policy)


def test_verification_leaves_training_mode_alone(load: Callable[..., Policy]) -> None:
    policy = load("llama")

    verify_policy(policy)

    assert policy.model.training


@pytest.mark.parametrize("model_type", ["qwen3_next", "llama4_text"])
def test_layers_that_carry_state_across_documents_are_refused(model_type: str) -> None:
    with pytest.raises(ValueError, match=f"{model_type}.*cannot be packed"):
        check_layer_types(AutoConfig.for_model(model_type))
