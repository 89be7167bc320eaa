from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grpo_fast.policy import Policy
from grpo_fast.policy.head import head_parameters


@pytest.mark.parametrize(
    ("family", "logit_scale", "softcap"),
    [("llama", 1.0, None), ("cohere", 0.25, None), ("granite", 1 / 3, None), ("gemma2", 1.0, 30.0)],
)
def test_the_constants_of_the_head_are_read_from_the_model(
    load: Callable[..., Policy], family: str, logit_scale: float, softcap: float | None
) -> None:
    head = load(family).head

    assert head.logit_scale == pytest.approx(logit_scale)
    assert head.softcap == softcap


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "cohere", "granite"])
def test_head_and_hidden_states_give_the_models_logits(load: Callable[..., Policy], family: str) -> None:
    model = load(family).model
    ids = torch.arange(4, 14)[None]

    with torch.no_grad():
        expected = model(ids).logits[0]
        actual = head_parameters(model).logits(model.base_model(ids).last_hidden_state[0])

    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
