from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from grpo_fast.head import linear_logprob, operator
from grpo_fast.head.plan import Device
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.head_bytes import HeadBytes, head_bytes
from grpo_fast.plan.measure import peak_bytes

CPU = torch.device("cpu")
HOPPER = device_budget("H200").head_device
Weight = Literal["trained", "added to", "frozen"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", ["trained", "added to", "frozen"])
@pytest.mark.parametrize("sizes", [(300, 64, 9000), (1100, 96, 3000)], ids=str)
def test_the_workspace_is_what_the_profiler_sees(
    sizes: tuple[int, int, int], weight: Weight, dtype: torch.dtype, rng: torch.Generator
) -> None:
    compare(Device("cpu"), sizes, weight, dtype, rng)


@pytest.mark.parametrize("weight", ["trained", "added to", "frozen"])
def test_so_it_is_for_exact_gradients_of_the_kernels(
    weight: Weight, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    if not torch.cuda.is_available():  # interpreted, and in float32: a CPU copies 16 bits for its products
        monkeypatch.setattr(operator, "device_facts", lambda kind, index: HOPPER)
        compare(HOPPER, (70, 48, 1200), weight, torch.float32, rng, tolerance=0.0)


def compare(
    device: Device,
    sizes: tuple[int, int, int],
    weight: Weight,
    dtype: torch.dtype,
    rng: torch.Generator,
    **options: Any,
) -> None:
    """Forward and backward on the CPU against the plan for a device."""
    rows, width, vocabulary = sizes
    adds, trained = weight == "added to", weight != "frozen"

    def operands() -> tuple[torch.Tensor, ...]:
        hidden = torch.randn(rows, width, generator=rng).to(dtype).requires_grad_()
        matrix = torch.randn(vocabulary, width, generator=rng).to(dtype)
        targets = torch.randint(vocabulary, (rows,), generator=rng)
        if adds:
            return hidden, matrix, targets, torch.zeros(vocabulary, width)
        return hidden, matrix.requires_grad_(trained), targets

    def forward(made: tuple[torch.Tensor, ...]) -> torch.Tensor:
        into = made[3] if adds else None
        outputs = ("logprob", "entropy")
        return linear_logprob(*made[:3], outputs=outputs, weight_grad=into, **options).logprob.sum()

    found = head_bytes(
        device,
        rows=rows,
        hidden=width,
        vocabulary=vocabulary,
        dtype=dtype,
        weight_trained=trained,
        weight_grad=adds,
        **options,
    )
    given = sum(tensor.nbytes for tensor in operands())
    gradients = rows * width * dtype.itemsize
    if trained and not adds:
        gradients += vocabulary * width * dtype.itemsize

    slack = 64 * rows  # a few numbers a row come and go beside what is planned for
    forward_peak = peak_bytes(operands, forward, CPU) - given
    assert abs(forward_peak - found.kept - found.forward) <= 0.05 * forward_peak + slack
    whole = peak_bytes(operands, lambda made: forward(made).backward(), CPU) - given
    planned = max(found.kept + found.forward, found.kept + found.backward + gradients)
    assert abs(whole - planned) <= 0.05 * whole + slack


ROWS, HIDDEN, VOCABULARY = 4096, 2048, 151936
WEIGHT = 2 * VOCABULARY * HIDDEN


def on_hopper(**options: Any) -> HeadBytes:
    given = {"rows": ROWS, "hidden": HIDDEN, "vocabulary": VOCABULARY, "weight_trained": True}
    return head_bytes(HOPPER, dtype=torch.bfloat16, **given | options)


def test_nothing_of_the_kernels_is_as_wide_as_the_vocabulary() -> None:
    found = on_hopper(rows=16384, weight_trained=False)

    assert max(found.forward, found.backward, found.kept) < 2 * 16384 * VOCABULARY / 4


def test_a_trained_weight_and_a_flat_batch_are_planned_for() -> None:
    frozen, trained = on_hopper(weight_trained=False), on_hopper()

    assert trained.backward >= frozen.backward + WEIGHT  # the sparse and the dense attempt hold one each
    assert trained.kept == frozen.kept
    added_in_place = on_hopper(rows=1024, weight_grad=True)
    assert on_hopper(rows=1024).backward - added_in_place.backward == WEIGHT


def test_a_gradient_of_the_entropy_has_no_sparse_lists() -> None:
    plain, of_entropy = on_hopper(), on_hopper(entropy_trained=True)

    assert of_entropy.backward < plain.backward
    assert of_entropy.kept == plain.kept
