"""Tensors visit the device and go back to the host to the bit, a few at a time.

On a CPU device and host are the same kind of memory, but every tensor still changes its storage.
"""

from __future__ import annotations

import weakref
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from grpo_fast.policy import host_memory
from grpo_fast.policy.host_memory import host_like, stream_through_device, to_host

CPU = torch.device("cpu")


def groups(rng: torch.Generator, device: torch.device = CPU) -> list[list[Tensor]]:
    """Of several sizes, dtypes and layouts, a parameter among them, on the host."""
    found: list[list[Tensor]] = []
    for _ in range(7):
        matrix, vector = torch.randn(64, 32, generator=rng), torch.randn(9, generator=rng)
        found.append([nn.Parameter(matrix.T.to(device)), vector.to(device)])
    found[2].append(torch.randn(5, 3, generator=rng).bfloat16().to(device))
    for tensor in chain(*found):
        to_host(tensor)
    return found


@pytest.mark.parametrize("device", [CPU, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_becomes_of_visitors_is_what_the_host_holds_and_three_groups_are_there_at_most(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    device = torch.device(device)
    tensors = groups(rng, device)
    expected = [tensor.detach() * 2 + 1 for tensor in chain(*tensors)]
    kinds = [(t.stride(), t.dtype, t.is_pinned()) for t in chain(*tensors)]
    copies_on, there, most = host_memory.copies_on, weakref.WeakSet(), []

    def counted(*arguments: object) -> object:
        homes, event = copies_on(*arguments)
        there.update(homes)
        most.append(len({id(home) for home in there}))
        return homes, event

    monkeypatch.setattr(host_memory, "copies_on", counted)
    hosts = [tensor.data_ptr() for tensor in tensors[0]]
    for index in stream_through_device(tensors, device):
        for tensor in tensors[index]:
            assert tensor.device.type == device.type and tensor.data_ptr() not in hosts
            tensor.data.mul_(2).add_(1)

    assert all(map(torch.equal, chain(*tensors), expected))
    assert kinds == [(t.stride(), t.dtype, t.is_pinned()) for t in chain(*tensors)]
    assert [tensor.data_ptr() for tensor in tensors[0]] == hosts and max(most) <= 3 * 3


def test_a_loop_far_ahead_of_the_device_waits_for_groups_to_leave(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With copies that never finish by themselves: a fetch waits until the group three before it is gone."""
    gone, left, fetched = [], [], []

    def copy(stream: object, targets: list[Tensor], sources: list[Tensor]) -> object:
        left.append(len(left))
        return SimpleNamespace(synchronize=partial(gone.append, left[-1]))

    def fetch(device: torch.device, tensors: list[Tensor], stream: object) -> object:
        fetched.append(len(fetched) - len(gone))
        return [tensor.detach().clone() for tensor in tensors], None

    monkeypatch.setattr(host_memory, "side_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(host_memory, "copy_beside", copy)
    monkeypatch.setattr(host_memory, "copies_on", fetch)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    tensors = groups(rng)
    assert [*stream_through_device(tensors, CPU)] == [*range(len(tensors))]

    assert len(left) == len(tensors) and gone == [*range(len(tensors) - 2)]
    assert max(fetched) == 2  # and the one that comes: three groups


def test_a_visit_that_breaks_off_loses_nothing_and_the_next_one_goes_on(rng: torch.Generator) -> None:
    tensors = groups(rng)
    expected = [tensor.detach().clone() for group in tensors for tensor in group]
    for stop in range(len(tensors)):
        for index in stream_through_device(tensors, CPU):
            if index == stop:
                break
    assert all(map(torch.equal, chain(*tensors), expected))
    assert [*stream_through_device(tensors, CPU)] == [*range(len(tensors))] and [
        *stream_through_device([], CPU)
    ] == []


def test_a_host_without_pinned_memory_to_give_gives_ordinary_memory(monkeypatch, caplog) -> None:
    plain = torch.empty_like

    def without_pinned(*args: object, pin_memory: bool = False, **options: object) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand how to compile for debugging")
        return plain(*args, **options)

    monkeypatch.setattr(torch, "empty_like", without_pinned)
    tensor = torch.ones(3, 4, dtype=torch.bfloat16).T

    buffer, _ = (host_like(tensor, pinned=True) for _ in range(2))

    assert (buffer.shape, buffer.stride(), buffer.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert caplog.text.count("no more pinned memory") == 1 and "debugging" not in caplog.text
