from __future__ import annotations

import pytest
import torch

from grpo_fast.head import linear_logprob
from grpo_fast.head.plan import Device
from grpo_fast.memory.devices import device_budget
from grpo_fast.memory.head_bytes import head_bytes
from grpo_fast.memory.measure import peak_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("sizes", [(300, 64, 9000), (1100, 96, 3000)], ids=str)
def test_the_workspace_is_what_the_profiler_sees(
    sizes: tuple[int, int, int], trained: bool, dtype: torch.dtype, rng: torch.Generator
) -> None:
    rows, width, vocabulary = sizes

    def operands() -> tuple[torch.Tensor, ...]:
        hidden = torch.randn(rows, width, generator=rng).to(dtype).requires_grad_()
        weight = torch.randn(vocabulary, width, generator=rng).to(dtype).requires_grad_(trained)
        return hidden, weight, torch.randint(vocabulary, (rows,), generator=rng)

    def forward(made: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return linear_logprob(*made, outputs=("logprob", "entropy")).logprob.sum()

    def both(made: tuple[torch.Tensor, ...]) -> None:
        forward(made).backward()

    found = head_bytes(
        Device("cpu"), rows=rows, hidden=width, vocabulary=vocabulary, dtype=dtype, weight_trained=trained
    )
    given = sum(tensor.nbytes for tensor in operands())
    matrix, weight = rows * width * dtype.itemsize, vocabulary * width * dtype.itemsize
    gradients = matrix + (weight if trained else 0)

    # A few numbers a row come and go beside what is planned for.
    slack = 64 * rows
    forward_peak = peak_bytes(operands, forward, CPU) - given
    assert abs(forward_peak - found.kept - found.forward) <= 0.03 * forward_peak + slack
    whole = peak_bytes(operands, both, CPU) - given
    planned = max(found.kept + found.forward, found.kept + found.backward + gradients)
    assert abs(whole - planned) <= 0.03 * whole + slack


def test_nothing_of_the_kernels_is_as_wide_as_the_vocabulary() -> None:
    sizes = {"rows": 16384, "hidden": 2048, "vocabulary": 151936, "dtype": torch.bfloat16}

    found = head_bytes(device_budget("H200").head_device, weight_trained=False, **sizes)

    logits = 2 * sizes["rows"] * sizes["vocabulary"]
    assert max(found.forward, found.backward, found.kept) < logits / 4


def test_a_trained_weight_and_a_flat_batch_are_planned_for() -> None:
    sizes = {"rows": 4096, "hidden": 2048, "vocabulary": 151936, "dtype": torch.bfloat16}
    device = device_budget("H200").head_device

    frozen, trained = (head_bytes(device, weight_trained=flag, **sizes) for flag in (False, True))

    weight = 2 * sizes["vocabulary"] * sizes["hidden"]
    assert trained.backward >= frozen.backward + weight  # the sparse and the dense attempt hold one each
    assert trained.kept == frozen.kept
