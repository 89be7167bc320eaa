"""Operators start their kernels on the device of their tensors."""

from __future__ import annotations

import pytest
import torch

from grpo_fast import GRPOLossConfig, LossInputs, linear_logprob
from grpo_fast.head.fused_loss import fused_policy_loss

pytest.importorskip("triton")


def test_kernels_start_on_the_device_of_their_tensors(hopper, make_call, rng, monkeypatch):
    from grpo_fast.kernels import policy_loss

    from grpo_fast.head import accelerated

    events: list[str] = []

    def record(module, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **how: events.append(name) or function(*args, **how))

    record(torch.cuda, "device_of")
    record(accelerated, "forward")
    record(accelerated, "backward")
    record(policy_loss, "policy_loss")
    call = hopper(make_call((5,), 140, 16))

    linear_logprob(call.hidden, call.weight, call.targets).logprob.sum().backward()
    row, ids = hopper(torch.rand(12, generator=rng)), hopper(torch.arange(3).repeat_interleave(4))
    fused_policy_loss(LossInputs(row, row, ids, ids >= 0, 3), GRPOLossConfig())

    assert events == ["device_of", "forward", "device_of", "backward", "device_of", "policy_loss"]
