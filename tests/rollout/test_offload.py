"""Parts leave the device and come back to the bit, whatever happens in between.

On a CPU the device and the buffers are the same kind of memory, but every tensor still changes its storage.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from grpo_fast.rollout.handover import MARGIN, PARTS, Offloader, host_buffer

CPU = torch.device("cpu")
SIZE = 2**12  # elements of a tensor that is worth moving
Parts = dict[str, dict[str, Tensor]]


def tensors(rng: torch.Generator, device: torch.device = CPU) -> Parts:
    """Parts of several dtypes and layouts, a parameter and a tensor too small to move among them."""
    return {
        "gradients": {"w": torch.randn(SIZE, generator=rng).to(device)},
        "optimizer": {
            "exp_avg.w": torch.randn(64, 64, generator=rng).to(device),
            "step.w": torch.tensor(3.0, device=device),
        },
        "master": {"w": torch.randn(64, 64, generator=rng).to(device).T},
        "reference": {"w": nn.Parameter(torch.randn(SIZE, generator=rng).bfloat16().to(device), False)},
    }


def offloader(parts: Parts, offload: object = PARTS[1:], **options: object) -> Offloader:
    named = {part: (lambda part=part: parts[part]) for part in parts}
    return Offloader(named, device=parts["master"]["w"].device, offload=offload, **options)


def away(moved: Offloader, needed: int = 0) -> int:
    """Bytes on the host after an offload."""
    moved.start_offload(needed)
    moved.finish_offload()
    return moved.offloaded_bytes()


def copies(parts: Parts) -> Parts:
    """Of everything whose content counts."""
    return {
        part: {name: tensor.detach().clone() for name, tensor in named.items()}
        for part, named in parts.items()
        if part != "gradients"
    }


def same(parts: Parts, before: Parts) -> bool:
    pairs = [(parts[part][name], tensor) for part, named in before.items() for name, tensor in named.items()]
    return all(torch.equal(a.detach().cpu(), b.cpu()) and a.stride() == b.stride() for a, b in pairs)


def test_parts_come_back_to_the_bit_with_their_latest_values_and_are_readable_on_the_host(rng) -> None:
    parts = tensors(rng)
    moved = offloader(parts)

    for _ in range(3):
        parts["master"]["w"].mul_(1.5)
        parts["optimizer"]["exp_avg.w"].add_(1)
        before, home = copies(parts), parts["master"]["w"].data_ptr()
        moved.start_offload()
        assert away(moved) == away(moved) == 2 * 4 * SIZE + 2 * SIZE and same(parts, before)
        assert parts["master"]["w"].data_ptr() != home
        moved.start_reload()
        moved.await_reload()
        assert moved.offloaded_bytes() == 0 and same(parts, before)


def test_gradient_buffers_are_only_freed_and_tensors_that_appear_later_are_offloaded_too(rng) -> None:
    parts = tensors(rng) | {"optimizer": {}}
    moved = offloader(parts, ["optimizer", "gradients"])
    assert away(moved) == 4 * SIZE and parts["gradients"]["w"].untyped_storage().nbytes() == 0
    moved.start_reload()
    expected = torch.randn(SIZE, generator=rng)
    assert torch.equal(parts["gradients"]["w"].copy_(expected), expected)

    parts["optimizer"] = {"exp_avg.w": torch.randn(SIZE, generator=rng)}
    assert away(moved) == 2 * 4 * SIZE


def test_moves_in_any_order_lose_nothing(rng) -> None:
    parts = tensors(rng)
    before, moved = copies(parts), offloader(parts, PARTS)
    moves = [moved.start_offload, moved.finish_offload, moved.start_reload]

    for move in torch.randint(3, (40,), generator=rng).tolist():
        moves[move]()
        assert same(parts, before)
    moved.start_reload()
    assert moved.offloaded_bytes() == 0 and same(parts, before)


def test_a_move_that_breaks_off_at_any_tensor_loses_nothing(rng) -> None:
    parts = tensors(rng)
    before, moved = copies(parts), offloader(parts)

    class Breaking(nn.Parameter):
        """A parameter whose storage cannot be exchanged while `broken`."""

        broken = True

        def __setattr__(self, name: str, value: object) -> None:
            if name == "data" and Breaking.broken:
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    parts["reference"]["w"] = Breaking(parts["reference"]["w"].detach().clone(), False)
    for move in (lambda: away(moved), moved.start_reload):
        Breaking.broken = True
        with pytest.raises(KeyboardInterrupt):
            move()
        assert same(parts, before)
        Breaking.broken = False
        move()
        assert same(parts, before)
    assert moved.offloaded_bytes() == 0


@pytest.mark.parametrize(
    ("needed", "missing", "expected"),
    [
        (2**30, 0, 0),
        (2**30, 1, 4 * SIZE),  # the gradients
        (2**30, 4 * SIZE + 1, 2 * 4 * SIZE),  # and the moments
        (2**30, 2 * 4 * SIZE + 1, 3 * 4 * SIZE),  # and the masters
        (2**30, 2**40, 3 * 4 * SIZE + 2 * SIZE),  # everything, and it is not enough
        (0, 2**40, 0),  # an engine that frees nothing needs nothing
    ],
)
def test_auto_offloads_as_much_as_the_engine_needs_room(
    rng, needed: int, missing: int, expected: int
) -> None:
    moved = offloader(tensors(rng), "auto", free_bytes=lambda: needed + MARGIN - missing)

    assert away(moved, needed) == expected


def test_an_early_reload_waits_for_room(rng) -> None:
    parts, room = tensors(rng), [0]
    before, moved = copies(parts), offloader(parts, free_bytes=lambda: room[0])
    held = away(moved)

    for free, expected in ((held + MARGIN - 1, held), (held + MARGIN, 0)):
        room[0] = free
        moved.reload_if_room()
        assert moved.offloaded_bytes() == expected
    assert same(parts, before)


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_given_back_and_the_copies_are_ordered(rng) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    parts = tensors(rng, device)
    parts["optimizer"]["exp_avg.large"] = torch.randn(2**26, device=device)
    moved = offloader(parts, PARTS)
    held = torch.cuda.memory_allocated(device)

    for _ in range(5):
        parts["optimizer"]["exp_avg.large"].mul_(1.25)  # queued just before the copy that must see it
        before = copies(parts)
        allocated = torch.cuda.memory_allocated(device)
        away(moved)
        assert torch.cuda.memory_allocated(device) <= allocated - 2**28
        assert parts["optimizer"]["exp_avg.large"].is_pinned()
        moved.start_reload()
        moved.await_reload()
        parts["gradients"]["w"].zero_()
        assert same(parts, before)
        del before
    assert torch.cuda.memory_allocated(device) == held


def test_a_host_without_pinned_memory_to_give_gives_ordinary_memory(monkeypatch, caplog) -> None:
    plain = torch.empty_like

    def without_pinned(*args: object, pin_memory: bool = False, **options: object) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand how to compile for debugging")
        return plain(*args, **options)

    monkeypatch.setattr(torch, "empty_like", without_pinned)
    tensor = torch.ones(3, 4, dtype=torch.bfloat16).T

    buffer = host_buffer(tensor, pinned=True)

    assert (buffer.shape, buffer.stride(), buffer.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert "no pinned memory" in caplog.text and "debugging" not in caplog.text
