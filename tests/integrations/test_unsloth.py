"""Unsloth's fused log-probabilities, and what its GRPO trainer calls, against ours in their place."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("unsloth") is None or find_spec("unsloth_zoo") is None:
    pytest.skip("unsloth is not importable: pip install unsloth==2026.10.9", allow_module_level=True)

os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", f"{tempfile.gettempdir()}/unsloth_compiled_cache")
import unsloth  # noqa: F401
from unsloth_zoo.fused_losses import fused_linear
from unsloth_zoo.rl_replacements import grpo_chunked_hidden_states_logprobs

from grpo_fast.integrations import unsloth as adapter

RESULTS = ("return_entropy", "return_mean_logits", "return_log_sum_sq_probs", "return_is_top1")


@pytest.fixture
def head(rng: torch.Generator) -> dict[str, Tensor]:
    return {
        "hidden": torch.randn(3, 7, 16, generator=rng).requires_grad_(),
        "weight": (0.3 * torch.randn(50, 16, generator=rng)).requires_grad_(),
        "bias": torch.randn(50, generator=rng).requires_grad_(),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "logit_softcapping": 5.0, "logit_scale_multiply": 0.5},
        {"temperature": 1.3, "logit_scale_divide": 2.0, "entropy_requires_grad": False},
    ],
)
def test_every_result_and_gradient_is_the_hosts(head, rng, options):
    targets = torch.randint(50, (3, 7), generator=rng)
    targets[0, 0] = -100
    mask, upstream = torch.rand(3, 7, generator=rng) < 0.8, torch.randn(2, 3, 7, generator=rng)

    def evaluate() -> list[Tensor]:
        asked: dict[str, Any] = dict.fromkeys(RESULTS, True)
        out = fused_linear.fused_linear_logprobs(
            head["hidden"], head["weight"], targets, bias=head["bias"], mask=mask, **asked, **options
        )
        loss = (out[0] * upstream[0]).sum() + (out[1] * upstream[1]).sum()
        return [*out, *torch.autograd.grad(loss, list(head.values()))]

    expected = evaluate()
    adapter.patch()
    adapter.patch()
    assert fused_linear.fused_linear_logprobs is adapter.fused_linear_logprobs
    found = evaluate()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert [value.requires_grad for value in found[:5]] == [value.requires_grad for value in expected[:5]]
    adapter.unpatch()
    assert fused_linear.fused_linear_logprobs is not adapter.fused_linear_logprobs


def test_the_grpo_trainers_scorer_runs_on_our_head(head, rng, monkeypatch):
    targets, upstream = torch.randint(50, (3, 7), generator=rng), torch.randn(3, 7, generator=rng)
    calls = []

    def evaluate() -> list[Tensor]:
        logprobs = grpo_chunked_hidden_states_logprobs(
            head["hidden"], head["weight"], targets, temperature=0.9, logit_softcapping=4.0
        )
        return [logprobs, *torch.autograd.grad((logprobs * upstream).sum(), [head["hidden"], head["weight"]])]

    expected = evaluate()
    ours = adapter.linear_logprob
    monkeypatch.setattr(adapter, "linear_logprob", lambda *a, **o: calls.append(1) or ours(*a, **o))
    adapter.patch()
    torch.testing.assert_close(evaluate(), expected, rtol=1e-4, atol=1e-5)
    assert calls
