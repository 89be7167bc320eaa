from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig

from grpo_fast.policy import Policy
from grpo_fast.policy.architecture import check_architecture, head_parameters, verify_policy

Load = Callable[..., Policy]


@pytest.mark.parametrize(
    ("family", "logit_scale", "softcap"),
    [("qwen2", 1.0, None), ("cohere", 0.25, None), ("granite", 1 / 3, None), ("gemma2", 1.0, 30.0)],
)
def test_the_heads_constants_are_read_and_give_the_models_logits(
    load: Load, family: str, logit_scale: float, softcap: float | None
) -> None:
    model = load(family).model
    ids, head = torch.arange(4, 14)[None], head_parameters(model)

    with torch.no_grad():
        actual = head.logits(model.base_model(ids).last_hidden_state[0])
        torch.testing.assert_close(actual, model(ids).logits[0], rtol=1e-4, atol=1e-4)
    assert (head.logit_scale, head.softcap) == (pytest.approx(logit_scale), softcap)


def loses_the_layout(policy: Policy) -> None:
    attention = policy.model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, packed_layout=None, **kwargs: forward(*args, **kwargs)


def ignores_positions(policy: Policy) -> None:
    rotary = policy.model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])


def scales_its_logits_otherwise(policy: Policy) -> None:
    policy.model.config.model_type = "hyperclovax"


@pytest.mark.parametrize(
    ("family", "spoil"),
    [("llama", loses_the_layout), ("llama", ignores_positions), ("granite", scales_its_logits_otherwise)],
)
def test_a_model_that_packing_does_not_understand_is_refused(
    load: Load, family: str, spoil: Callable[[Policy], None]
) -> None:
    policy = load(family)
    verify_policy(policy)
    assert policy.model.training

    spoil(policy)

    with pytest.raises(ValueError, match=r"packed logits.*model\.attention"):
        verify_policy(policy)


@pytest.mark.parametrize("model_type", ["qwen3_next", "llama4_text"])
def test_layers_that_carry_state_across_documents_are_refused(model_type: str) -> None:
    with pytest.raises(ValueError, match=f"{model_type}.*cannot be packed"):
        check_architecture(AutoConfig.for_model(model_type))
