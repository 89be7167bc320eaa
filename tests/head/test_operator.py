"""On which device the operators start their kernels."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from grpo_fast import GRPOLossConfig, LossInputs, linear_logprob
from grpo_fast.head.fused_loss import fused_policy_loss

pytest.importorskip("triton")


@pytest.mark.usefixtures("hopper")
def test_kernels_start_on_the_device_of_their_tensors(make_call, rng, monkeypatch):
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
    call = make_call((5,), 140, 16)

    linear_logprob(call.hidden, call.weight, call.targets).logprob.sum().backward()
    fused_policy_loss(batch(rng), GRPOLossConfig())

    assert calls == [("forward", True), ("backward", True), ("policy_loss", True)]
    assert not current


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_current_gives_the_same_numbers(make_call, rng):
    call, results = make_call((40,), 1000, 64), []
    inputs = batch(rng)
    for device in ("cuda:0", "cuda:1"):
        operands = [t.detach().to(device).requires_grad_(t.requires_grad) for t in call.parameters]
        linear_logprob(*operands, call.targets.to(device)).logprob.sum().backward()
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(inputs).items()}
        loss = fused_policy_loss(LossInputs(**moved), GRPOLossConfig()).loss
        results.append([t.grad.cpu() for t in operands] + [loss.cpu()])

    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


def batch(rng) -> LossInputs:
    return LossInputs(
        logprobs=-torch.rand(12, generator=rng),
        advantages=torch.randn(12, generator=rng),
        sequence_ids=torch.arange(3).repeat_interleave(4),
        loss_mask=torch.ones(12, dtype=torch.bool),
        num_sequences=3,
    )
