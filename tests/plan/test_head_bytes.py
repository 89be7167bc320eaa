from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_fast.head import linear_logprob, operator
from grpo_fast.head.plan import Device, Workload
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.head_bytes import head_bytes
from grpo_fast.plan.measure import peak_bytes

CPU = torch.device("cpu")
HOPPER = device_budget("H200")
WAYS = [(True, False), (True, True), (False, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("trained", "adds"), WAYS, ids=["trained", "added to", "frozen"])
@pytest.mark.parametrize("sizes", [(300, 64, 9000), (1100, 96, 3000)], ids=str)
def test_the_workspace_is_what_the_profiler_sees(
    sizes: tuple[int, int, int], trained: bool, adds: bool, dtype: torch.dtype, rng: torch.Generator
) -> None:
    rows, width, vocabulary = sizes
    call = Workload(rows, vocabulary, dtype, extra_statistics=1, hidden_size=width, trainable=trained)
    compare(Device("cpu"), call, adds, rng)


@pytest.mark.parametrize(("trained", "adds"), WAYS[1:], ids=["added to", "frozen"])
def test_so_it_is_for_exact_gradients_of_the_kernels(
    trained: bool, adds: bool, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    if not torch.cuda.is_available():  # interpreted, and in float32: a CPU copies 16 bits for its products
        monkeypatch.setattr(operator, "device_facts", lambda kind, index: HOPPER)
        # Only the log-probability's gradient is made ahead, and here the entropy's might be asked for.
        facts = {"extra_statistics": int(trained), "trainable": trained, "tolerance": 0.0}
        call = Workload(70, 1200, torch.float32, hidden_size=48, **facts)
        compare(HOPPER, call, adds, rng)


def compare(device: Device, call: Workload, adds: bool, rng: torch.Generator) -> None:
    """Forward and backward on the CPU against the plan for a device."""
    rows, width, vocabulary, dtype = call.rows, call.hidden_size, call.vocabulary, call.dtype

    def operands() -> tuple[torch.Tensor, ...]:
        hidden = torch.randn(rows, width, generator=rng).to(dtype).requires_grad_()
        matrix = torch.randn(vocabulary, width, generator=rng).to(dtype)
        targets = torch.randint(vocabulary, (rows,), generator=rng)
        if adds:
            return hidden, matrix, targets, torch.zeros(vocabulary, width)
        return hidden, matrix.requires_grad_(call.trainable), targets

    def forward(made: tuple[torch.Tensor, ...]) -> torch.Tensor:
        into = made[3] if adds else None
        outputs = ("logprob", "entropy")[: 1 + call.extra_statistics]
        out = linear_logprob(*made[:3], outputs=outputs, weight_grad=into, tolerance=call.tolerance)
        return out.logprob.sum()

    found = head_bytes(device, call, weight_grad=adds)
    given = sum(tensor.nbytes for tensor in operands())
    gradients = rows * width * dtype.itemsize
    if call.trainable and not adds:
        gradients += vocabulary * width * dtype.itemsize

    slack = 160 * rows  # what comes and goes beside what is planned for: more in Triton's interpreter on 3.13
    forward_peak = peak_bytes(operands, forward, CPU) - given
    assert abs(forward_peak - found.kept - found.forward) <= 0.05 * forward_peak + slack
    whole = peak_bytes(operands, lambda made: forward(made).backward(), CPU) - given
    planned = max(found.kept + found.forward, found.kept + found.backward + gradients)
    assert abs(whole - planned) <= 0.05 * whole + slack


ON_HOPPER = Workload(4096, 151936, torch.bfloat16, extra_statistics=1, hidden_size=2048)


def test_a_flat_batch_is_planned_for_but_not_for_a_gradient_of_the_entropy() -> None:
    many = replace(ON_HOPPER, rows=16384)
    planned = head_bytes(HOPPER, many)

    room = 16384 * 1187 / 10 * (128 * 2 + 16)  # for the most pairs
    assert 1.0 < planned.backward / room < 1.1
    assert head_bytes(HOPPER, many, weight_grad=True) == planned
    assert head_bytes(HOPPER, replace(many, trainable=False)).kept == planned.kept
    few = head_bytes(HOPPER, ON_HOPPER)  # of which the dense path holds more
    assert few.backward > 1.3 * 4096 * 1187 / 10 * (128 * 2 + 16)
    of_entropy = head_bytes(HOPPER, replace(ON_HOPPER, mean_gradient=True))  # without pairs
    assert of_entropy.backward < few.backward
    assert of_entropy.kept == few.kept
