"""Tensors visit the device and go back to the same host memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from grpo_fast.policy.host_memory import host_like, on_device, to_host

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", [CPU, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_becomes_of_visitors_is_what_the_host_holds(
    rng: torch.Generator, device: torch.device | str
) -> None:
    """Also where the visit breaks off; of a parameter, a vector, and a transposed matrix in 16 bits."""
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
