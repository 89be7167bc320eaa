"""Sampled log-probabilities agree with the policy's forward up to rounding, which the dtype decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.rollout import Completion, agreement

UNIFORM = torch.log(torch.tensor(0.25)).item()  # of four tokens


@pytest.mark.parametrize(
    ("dtype", "device", "apart", "agrees"),
    [
        (torch.bfloat16, "cpu", 0.1, True),
        (torch.float32, "cuda", 0.1, False),
        (torch.float32, "cuda", 0.01, True),
        (torch.float32, "cpu", 0.01, False),
        (torch.bfloat16, "cpu", torch.nan, False),
    ],
)
def test_agreement_is_up_to_rounding_and_never_with_nan(dtype, device, apart, agrees, monkeypatch):
    monkeypatch.setattr(agreement, "own_logits", lambda model, ids: torch.zeros(len(ids), 4))
    monkeypatch.setattr(agreement, "random_tokens", lambda model, count, _: torch.zeros(count, dtype=int))
    model: Any = torch.nn.Identity()
    model.dtype, model.device = dtype, SimpleNamespace(type=device)
    said = Completion((1, 2), (UNIFORM, UNIFORM + 2 * apart), "", False)

    def check() -> float:
        return agreement.require_agreement(model, lambda prompts, n, _: [[said] * n] * len(prompts), "remedy")

    if agrees:
        assert check() == pytest.approx(apart, rel=1e-3)
    else:
        with pytest.raises(ValueError, match=r"Identity cannot be sampled.* nats .*; remedy"):
            check()
