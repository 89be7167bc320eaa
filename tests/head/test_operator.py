"""On which device the operators start their kernels."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from grpo_fast import GRPOLossConfig, LossInputs, linear_logprob
from grpo_fast.head.fused_loss import fused_policy_loss

pytest.importorskip("triton")


def test_kernels_start_on_the_device_of_their_tensors(hopper, make_call, rng, monkeypatch):
    from grpo_fast.kernels import policy_loss

    from grpo_fast.head import accelerated

    current: list[torch.Tensor] = []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    calls: list[tuple[str, bool]] = []

    def record(module, name: str) -> None:
        function = getattr(module, name)

        def recorded(*args, **options):
            calls.append((name, bool(current)))
            return function(*args, **options)

        monkeypatch.setattr(module, name, recorded)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    record(accelerated, "forward")
    record(accelerated, "backward")
    record(policy_loss, "policy_loss")
    call = hopper(make_call((5,), 140, 16))

    linear_logprob(call.hidden, call.weight, call.targets).logprob.sum().backward()
    row, ids = hopper(torch.rand(12, generator=rng)), hopper(torch.arange(3).repeat_interleave(4))
    fused_policy_loss(LossInputs(row, row, ids, ids >= 0, 3), GRPOLossConfig())

    assert calls == [("forward", True), ("backward", True), ("policy_loss", True)]
    assert not current
