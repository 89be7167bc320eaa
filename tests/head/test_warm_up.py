"""After a warm-up no later call has anything to compile."""

from __future__ import annotations

import pytest
import torch

from grpo_fast import GRPOLossConfig, linear_grpo_loss
from grpo_fast.head import HeadParameters, linear_logprob, warm_up

PLAIN, EVERYTHING = {}, {"loss_type": "grpo", "beta": 0.1, "entropy_coef": 0.01, "kl_estimator": "k2"}


@pytest.fixture
def launched(monkeypatch) -> set[tuple]:
    """What was launched: kernels by what they are specialised in, as far as the interpreter knows it."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    found: set[tuple] = set()
    launch = interpreter.GridExecutor.__call__

    def told(value: object) -> object:
        if value is None or isinstance(value, bool | str):
            return value
        return str(getattr(value, "dtype", None) or getattr(value, "block_shape", type(value)))

    def noted(self, *arguments, **options):
        constants = {name: value for name, value in options.items() if name.isupper()}
        told_of = [told(a) for a in arguments] + [(name, told(a)) for name, a in sorted(options.items())]
        found.add((self.fn.__name__, str(told_of), str(constants)))
        return launch(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    return found


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("tolerance", [None, 0.0])
@pytest.mark.drawn(2)
def test_after_a_warm_up_a_step_launches_nothing_new(
    hopper, make_call, rng, launched, monkeypatch, trainable, options, tolerance
):
    from grpo_fast.head import accelerated

    call, loss = hopper(make_call((8,), 140, dtype=torch.bfloat16)), GRPOLossConfig(**options)
    call.weight.requires_grad_(trainable)
    head = HeadParameters(call.weight, tolerance=tolerance)

    warm_up(head, loss=loss, weight_grad=torch.float32)

    assert call.weight.grad is None
    known, row = set(launched), hopper(torch.randn(8, generator=rng))
    into = torch.zeros_like(call.weight, dtype=torch.float32) if trainable else None
    ids = torch.arange(8, device=row.device) // 2
    with torch.no_grad():
        linear_logprob(call.hidden, call.weight, call.targets, **head.options)
    for captured in (False, True):
        monkeypatch.setattr(accelerated, "_capturing", lambda _, captured=captured: captured)
        for old in (None, row):
            found = linear_grpo_loss(
                call.hidden, call.weight.detach(), call.targets, row, sequence_ids=ids, num_sequences=4,
                old_logprobs=old, ref_logprobs=row if loss.needs_reference else None, config=loss,
                entropy=True, weight_grad=into, **head.options,
            )  # fmt: skip
            torch.autograd.grad(found.loss, call.hidden)

    assert len(known) > 5
    assert launched == known


def test_where_no_kernel_runs_nothing_is_warmed_up(make_call, monkeypatch):
    call = make_call()
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: pytest.fail("something was differentiated"))

    warm_up(HeadParameters(call.weight))
