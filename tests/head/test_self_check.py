"""A warm-up compares the kernels with plain torch, and falls back to it if they are wrong."""

from __future__ import annotations

import logging

import pytest
import torch

from grpo_fast.cli import doctor
from grpo_fast.head import HeadParameters, accelerated, warm_up
from grpo_fast.head.operator import backend_on, use_kernels
from grpo_fast.head.warm_up import KernelMismatch, check_kernels

FORWARD, BACKWARD = accelerated.forward, accelerated.backward


def wrong_forward(call, plan):
    statistics, saved = FORWARD(call, plan)
    wrong = {name: getattr(statistics, name) + by for name, by in (("logprob", 5e-3), ("logsumexp", -5e-3))}
    return statistics._replace(**wrong), saved


def wrong_backward(call, *others):
    result = BACKWARD(call, *others)
    if call.weight_grad is not None:
        call.weight_grad[-20:] = 0
        return result
    return result._replace(hidden=result.hidden * 1.2)


def forward_that_does_not_compile(call, plan):
    raise RuntimeError("PassManager::run failed")


WRONG = {
    "a wrong forward": ("forward", wrong_forward),
    "a wrong backward": ("backward", wrong_backward),
    "no compilation": ("forward", forward_that_does_not_compile),
}


@pytest.fixture
def make_head(hopper, make_call, request):
    def make(dtype=torch.bfloat16, *, trainable: bool = True, tolerance: float | None = None):
        call = hopper(make_call((2,), 140, 24, dtype=dtype, bias=trainable))
        call.weight.requires_grad_(trainable)
        request.addfinalizer(lambda: use_kernels(call.weight.device, True))
        return HeadParameters(call.weight, call.bias, logit_scale=0.5, tolerance=tolerance)

    return make


def backend(head: HeadParameters) -> str:
    return backend_on(head.weight.device.type, head.weight.device.index, head.weight.dtype)


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.drawn(3)
def test_right_kernels_agree_with_torch(make_head, dtype, trainable):
    head = make_head(dtype, trainable=trainable)
    check_kernels(head)
    assert backend(head) == "triton" and head.weight.grad is None


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.drawn(3)
def test_a_wrong_kernel_is_replaced_by_torch_with_one_warning(
    make_head, monkeypatch, caplog, name, trainable
):
    head = make_head(trainable=trainable)
    monkeypatch.setattr(accelerated, *WRONG[name])
    with pytest.raises(RuntimeError, match=r"kernels do not work .* with model\.head = auto plain torch"):
        warm_up(head, implementation="triton")
    assert backend(head) == "triton"
    caplog.clear()
    with caplog.at_level(logging.WARNING, "grpo_fast.head.warm_up"):
        warm_up(head)
    _, warning = caplog.messages  # after the one about compilation
    reason = "PassManager::run failed" if name == "no compilation" else KernelMismatch.__name__
    assert backend(head) == "reference" and "model.head = reference" in warning and reason in warning
    warm_up(head)  # of a later stage
    assert backend(head) == "reference" and len(caplog.messages) == 2


def test_the_reference_is_chosen_without_a_launch(make_head, monkeypatch):
    monkeypatch.setattr(accelerated, "forward", forward_that_does_not_compile)
    warm_up(head := make_head(), implementation="reference")
    assert backend(head) == "reference"


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.drawn(1)
def test_sampled_kernels_agree_with_torch_with_a_trained_bias(hopper, make_call, spread):
    call = hopper(make_call((2,), 3000, 24, dtype=torch.bfloat16, bias=True))
    weight = (call.weight.detach() * spread).requires_grad_()
    check_kernels(HeadParameters(weight, call.bias))


def test_doctor_finds_right_kernels_right(hopper, make_call):
    assert "kernels that agree with torch" in next(doctor.head()).detail
