"""The head's stand-in is there for one forward, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from grpo_fast.integrations.head_tap import tapped_head


@pytest.fixture
def model(small_llama: Callable[..., Any]) -> nn.Module:
    return small_llama(vocab_size=31)


def test_the_function_sees_what_the_head_sees(model: nn.Module, rng: torch.Generator) -> None:
    ids = torch.randint(0, 31, (2, 5), generator=rng)
    expected = model(ids).logits
    with tapped_head(model, lambda hidden, head: hidden @ head.weight.T) as tap:
        output = model(ids)
    torch.testing.assert_close(tap.result, expected)
    assert output.logits.shape == (2, 5, 0)


def test_hooks_of_the_head_see_the_results(model: nn.Module) -> None:
    seen = []
    model.lm_head.register_forward_hook(lambda _m, _a, result: seen.append(result))
    with tapped_head(model, lambda hidden, _: {"length": hidden.norm(dim=-1)}) as tap:
        model(torch.zeros(1, 3, dtype=torch.long))
    assert seen == [tap.result]


def test_nothing_stays_even_after_an_error(model: nn.Module) -> None:
    before, head = dict(vars(model)), model.lm_head
    keys = set(model.state_dict())

    def fail(hidden: torch.Tensor, _: object) -> None:
        raise RuntimeError("inside the head")

    with pytest.raises(RuntimeError, match="inside the head"), tapped_head(model, fail):
        assert set(model.state_dict()) == keys - {"lm_head.weight"}
        model(torch.zeros(1, 3, dtype=torch.long))
    assert vars(model) == before and model.lm_head is head and "forward" not in vars(head)


def test_a_model_without_a_plain_head_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="output head"), tapped_head(model.model, lambda *_: None):
        pass
