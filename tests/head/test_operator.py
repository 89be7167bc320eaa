"""On which device the operators start their kernels."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from grpo_fast import GRPOLossConfig, LossInputs, linear_logprob
from grpo_fast.head.fused_loss import fused_policy_loss

pytest.importorskip("triton")


@pytest.fixture
def guarded(monkeypatch) -> list[torch.Tensor]:
    """The tensors whose device is current, innermost last."""
    current: list[torch.Tensor] = []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    return current


def recorded(monkeypatch, module, name: str, guarded: list[torch.Tensor]) -> list[bool]:
    """For every call of the function, whether a device was made current."""
    calls, function = [], getattr(module, name)

    def record(*args, **options):
        calls.append(bool(guarded))
        return function(*args, **options)

    monkeypatch.setattr(module, name, record)
    return calls


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_the_heads_kernels_start_on_the_device_of_the_hidden_states(
    make_call, monkeypatch, guarded, tolerance
):
    from grpo_fast.head import accelerated

    calls = [recorded(monkeypatch, accelerated, name, guarded) for name in ("forward", "backward")]
    call = make_call((5,), 140, 16)

    linear_logprob(call.hidden, call.weight, call.targets, tolerance=tolerance).logprob.sum().backward()

    assert calls == [[True], [True]]
    assert not guarded


def test_the_policy_loss_starts_on_the_device_of_the_log_probabilities(rng, monkeypatch, guarded):
    from grpo_fast.kernels import policy_loss

    calls = recorded(monkeypatch, policy_loss, "policy_loss", guarded)

    fused_policy_loss(batch(rng, "cpu"), GRPOLossConfig())

    assert calls == [True]
    assert not guarded


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_current_gives_the_same_numbers(make_call, rng):
    call, results = make_call((40,), 1000, 64), []
    inputs = batch(rng, "cpu")
    for device in ("cuda:0", "cuda:1"):
        operands = [t.detach().to(device).requires_grad_(t.requires_grad) for t in call.parameters]
        linear_logprob(*operands, call.targets.to(device)).logprob.sum().backward()
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(inputs).items()}
        loss = fused_policy_loss(LossInputs(**moved), GRPOLossConfig()).loss
        results.append([t.grad.cpu() for t in operands] + [loss.cpu()])

    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


def batch(rng, device: str) -> LossInputs:
    return LossInputs(
        logprobs=(-torch.rand(12, generator=rng)).to(device),
        advantages=torch.randn(12, generator=rng).to(device),
        sequence_ids=torch.arange(3, device=device).repeat_interleave(4),
        loss_mask=torch.ones(12, dtype=torch.bool, device=device),
        num_sequences=3,
    )
