"""Unsloth's fused log-probabilities, and what its GRPO trainer calls, against ours in their place."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_stubs import assert_unchanged_by_patch, with_gradients
from torch import Tensor

if find_spec("unsloth") is None or find_spec("unsloth_zoo") is None:
    pytest.skip("unsloth is not importable: pip install unsloth==2026.10.9", allow_module_level=True)

os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", f"{tempfile.gettempdir()}/unsloth_compiled_cache")
import unsloth  # noqa: F401
from unsloth_zoo.fused_losses import fused_linear
from unsloth_zoo.rl_replacements import grpo_chunked_hidden_states_logprobs

from grpo_fast.integrations import unsloth as adapter

HOST = SimpleNamespace(adapter=adapter)
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
    targets, mask = torch.randint(50, (3, 7), generator=rng), torch.rand(3, 7, generator=rng) < 0.8
    targets[0, 0] = -100

    def evaluate() -> list[Any]:
        given = {"bias": head["bias"], "mask": mask, **dict.fromkeys(RESULTS, True), **options}
        out = fused_linear.fused_linear_logprobs(head["hidden"], head["weight"], targets, **given)
        return [*out, *with_gradients(out[:2], head.values()), *(value.requires_grad for value in out)]

    assert_unchanged_by_patch(HOST, evaluate, rtol=1e-4, atol=1e-5)
    assert fused_linear.fused_linear_logprobs is adapter.fused_linear_logprobs
    adapter.unpatch()
    assert fused_linear.fused_linear_logprobs is not adapter.fused_linear_logprobs


def test_the_grpo_trainers_scorer_runs_on_our_head(head, rng, monkeypatch):
    targets, ours, calls = torch.randint(50, (3, 7), generator=rng), adapter.linear_logprob, []
    monkeypatch.setattr(adapter, "linear_logprob", lambda *a, **o: calls.append(1) or ours(*a, **o))

    def evaluate() -> list[Tensor]:
        rows = head["hidden"], head["weight"]
        options = {"temperature": 0.9, "logit_softcapping": 4.0}
        return with_gradients([grpo_chunked_hidden_states_logprobs(*rows, targets, **options)], rows)

    assert_unchanged_by_patch(HOST, evaluate, rtol=1e-4, atol=1e-5)
    assert calls
