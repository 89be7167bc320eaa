"""Tensors visit the device and go back to the same host memory."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from grpo_fast.policy import host_memory
from grpo_fast.policy.host_memory import ARENA, Arenas, host_like, on_device, to_host

CPU = torch.device("cpu")


@pytest.fixture
def locked(monkeypatch):
    """Bytes by address that a GPU would find page-locked; every host tensor is to be pinned."""
    pages = {}
    monkeypatch.setattr(host_memory, "page_lock", pages.__setitem__)
    monkeypatch.setattr(host_memory, "page_unlock", pages.pop)
    monkeypatch.setattr(host_memory, "ARENAS", Arenas())
    monkeypatch.setattr(host_memory, "host_like", partial(host_like, pinned=True))
    return pages


@pytest.mark.parametrize("device", [CPU, "pinned", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_becomes_of_visitors_is_what_the_host_holds(rng, device, request):
    """Also where the visit breaks off; of a parameter, a vector, and a transposed matrix in 16 bits."""
    if device == "pinned":
        request.getfixturevalue("locked")
        device = CPU
    device = torch.device(device)
    parameter = nn.Parameter(torch.randn(64, 32, generator=rng).T.to(device))
    tensors = [parameter, torch.randn(9, generator=rng).to(device)]
    tensors.append(torch.randn(5, 3, generator=rng).bfloat16().T.to(device))
    for tensor in tensors:
        to_host(tensor)
    expected = [tensor.detach() * 2 + 1 for tensor in tensors]
    kinds = [(t.data_ptr(), t.stride(), t.dtype, t.is_pinned()) for t in tensors]

    with pytest.raises(KeyboardInterrupt), on_device(tensors, device):
        for tensor in tensors:
            assert tensor.device.type == device.type
            tensor.data.mul_(2).add_(1)
        raise KeyboardInterrupt
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()

    assert all(map(torch.equal, tensors, expected))
    assert kinds == [(t.data_ptr(), t.stride(), t.dtype, t.is_pinned()) for t in tensors]


def test_pinned_memory_is_what_tensors_take_and_one_arena(locked, tmp_path):
    """Tensors of a layer, each a little more than a power of two, of which torch would pin twice as much."""
    sizes = [2**22 + 8, 3 * 2**21, *[2**10 + 1] * 40, 0, 2**18 + 3]
    tensors = {str(place): torch.full((size,), float(place)) for place, size in enumerate(sizes)}
    hosts = {name: host_memory.host_like(tensor).copy_(tensor) for name, tensor in tensors.items()}
    pinned = sum(locked.values())
    exact = sum(tensor.nbytes for tensor in tensors.values())
    assert exact <= pinned <= exact + ARENA and len(locked) == 3

    save_file(hosts, tmp_path / "saved.safetensors")
    assert (tmp_path / "saved.safetensors").stat().st_size < exact + 2**14
    assert all(torch.equal(hosts[name], tensor) for name, tensor in tensors.items())
    del hosts["0"]
    gc.collect()
    assert pinned - sum(locked.values()) == tensors["0"].nbytes // 512 * 512 + 512
    hosts.clear()
    host_memory.ARENAS = Arenas()
    gc.collect()
    assert not locked


def test_a_host_without_pinned_memory_to_give_gives_ordinary_memory(locked, monkeypatch, caplog):
    def without_pinned(address, size):
        raise RuntimeError("CUDA error: out of memory\nand how to compile for debugging")

    monkeypatch.setattr(host_memory, "page_lock", without_pinned)
    tensor = torch.ones(3, 4, dtype=torch.bfloat16).T

    buffer, _ = (host_like(tensor, pinned=True) for _ in range(2))

    assert (buffer.shape, buffer.stride(), buffer.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert caplog.text.count("no more pinned memory") == 1 and "debugging" not in caplog.text
