"""Parts leave the device and come back to the bit, whatever happens in between.

On a CPU the device and the buffers are the same kind of memory, but every tensor still changes its storage.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from grpo_fast.rollout.residency import ROOM, Residency, host_buffer

CPU = torch.device("cpu")
SIZE = 2**12  # elements of a tensor that is worth moving


def tensors(rng: torch.Generator, device: torch.device = CPU) -> dict[str, dict[str, Tensor]]:
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


def residency(parts: dict[str, dict[str, Tensor]], **options: object) -> Residency:
    named = {part: (lambda part=part: parts[part]) for part in parts}
    options = {
        "device": parts["master"]["w"].device,
        "offload": ("optimizer", "master", "reference"),
        **options,
    }
    return Residency(named, **options)


def kept(parts: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of everything whose content counts."""
    return {
        f"{part}.{name}": tensor.detach().clone()
        for part, named in parts.items()
        if part != "gradients"
        for name, tensor in named.items()
    }


def same(parts: dict[str, dict[str, Tensor]], before: dict[str, Tensor]) -> bool:
    return all(
        torch.equal(tensor.detach().cpu(), before[f"{part}.{name}"].cpu())
        and tensor.stride() == before[f"{part}.{name}"].stride()
        for part, named in parts.items()
        if part != "gradients"
        for name, tensor in named.items()
    )


def test_what_left_comes_back_to_the_bit_and_is_readable_while_it_is_away(rng: torch.Generator) -> None:
    parts = tensors(rng)
    before, moved = kept(parts), residency(parts)
    home = parts["master"]["w"].data_ptr()

    for _ in range(3):
        moved.leave()
        moved.release()
        assert moved.away_bytes() == 2 * 4 * SIZE + 2 * SIZE and same(parts, before)
        assert parts["master"]["w"].data_ptr() != home
        moved.fetch()
        moved.ready()
        assert moved.away_bytes() == 0 and same(parts, before)


def test_what_changes_between_two_trips_is_what_comes_back(rng: torch.Generator) -> None:
    parts = tensors(rng)
    moved = residency(parts)

    for _ in range(3):
        parts["master"]["w"].mul_(1.5)
        parts["optimizer"]["exp_avg.w"].add_(1)
        before = kept(parts)
        moved.leave()
        moved.release()
        moved.fetch()
        assert same(parts, before)


def test_gradient_buffers_are_only_freed_and_hold_their_size_again(rng: torch.Generator) -> None:
    parts = tensors(rng)
    moved = residency(parts, offload=("gradients",))

    moved.leave()
    moved.release()
    assert parts["gradients"]["w"].untyped_storage().nbytes() == 0 and moved.away_bytes() == 4 * SIZE
    moved.fetch()

    expected = torch.randn(SIZE, generator=rng)
    assert torch.equal(parts["gradients"]["w"].copy_(expected), expected)


def test_every_move_may_be_repeated(rng: torch.Generator) -> None:
    parts = tensors(rng)
    before, moved = kept(parts), residency(parts, offload=("gradients", "optimizer", "master", "reference"))

    for moves in ("ff", "llrr", "lrlr", "ff", "llf", "rf", "lrf"):
        for move in moves:
            {"l": moved.leave, "r": moved.release, "f": moved.fetch}[move]()
        assert same(parts, before)
    assert moved.away_bytes() == 0


def test_a_move_that_breaks_off_at_any_tensor_loses_nothing(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tensors(rng)
    before, moved = kept(parts), residency(parts)

    class Breaking(nn.Parameter):
        """A parameter whose storage cannot be exchanged while `broken`."""

        broken = True

        def __setattr__(self, name: str, value: object) -> None:
            if name == "data" and Breaking.broken:
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    parts["reference"]["w"] = Breaking(parts["reference"]["w"].detach().clone(), False)
    moved.leave()
    with pytest.raises(KeyboardInterrupt):
        moved.release()
    assert same(parts, before)
    moved.fetch()
    assert same(parts, before)
    Breaking.broken = False
    moved.leave()
    moved.release()
    Breaking.broken = True
    with pytest.raises(KeyboardInterrupt):
        moved.fetch()
    assert same(parts, before)
    Breaking.broken = False
    moved.fetch()
    assert same(parts, before) and moved.away_bytes() == 0


def test_tensors_that_appear_later_leave_too(rng: torch.Generator) -> None:
    parts = tensors(rng)
    parts["optimizer"] = {}
    moved = residency(parts, offload=("optimizer",))
    moved.leave()
    moved.release()
    assert moved.away_bytes() == 0
    moved.fetch()

    parts["optimizer"] = {"exp_avg.w": torch.randn(SIZE, generator=rng)}
    moved.leave()
    moved.release()

    assert moved.away_bytes() == 4 * SIZE


def free(amount: int) -> Callable[[], int]:
    return lambda: amount


@pytest.mark.parametrize(
    ("missing", "leaving"),
    [
        (0, 0),
        (1, 4 * SIZE),  # the gradients do
        (4 * SIZE + 1, 2 * 4 * SIZE),  # and the moments
        (2 * 4 * SIZE + 1, 3 * 4 * SIZE),  # and the masters
        (2**40, 3 * 4 * SIZE + 2 * SIZE),  # everything, and it is not enough
    ],
)
def test_auto_lets_as_much_leave_as_the_engine_needs_room(
    rng: torch.Generator, missing: int, leaving: int
) -> None:
    parts, needed = tensors(rng), 2**30
    moved = residency(parts, offload="auto", free_bytes=free(needed + ROOM - missing))

    moved.leave(needed)
    moved.release()

    assert moved.away_bytes() == leaving


def test_auto_moves_nothing_for_an_engine_that_gives_nothing_up(rng: torch.Generator) -> None:
    moved = residency(tensors(rng), offload="auto", free_bytes=free(0))
    moved.leave(0)
    moved.release()
    assert moved.away_bytes() == 0


def test_an_early_return_waits_for_room(rng: torch.Generator) -> None:
    parts, room = tensors(rng), [0]
    before, moved = kept(parts), residency(parts, free_bytes=lambda: room[0])
    moved.leave()
    moved.release()
    away = moved.away_bytes()

    room[0] = away + ROOM - 1
    moved.fetch_if_room()
    assert moved.away_bytes() == away
    room[0] = away + ROOM
    moved.fetch_if_room()
    assert moved.away_bytes() == 0 and same(parts, before)


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_given_back_and_the_copies_are_ordered(rng: torch.Generator) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    parts = tensors(rng, device)
    parts["optimizer"]["exp_avg.large"] = torch.randn(2**26, device=device)
    moved = residency(parts, offload=("gradients", "optimizer", "master", "reference"))
    held = torch.cuda.memory_allocated(device)

    for _ in range(5):
        parts["optimizer"]["exp_avg.large"].mul_(1.25)  # queued just before the copy that must see it
        before = kept(parts)
        allocated = torch.cuda.memory_allocated(device)
        moved.leave()
        moved.release()
        assert torch.cuda.memory_allocated(device) <= allocated - 2**28
        assert parts["optimizer"]["exp_avg.large"].is_pinned()
        moved.fetch()
        moved.ready()
        parts["gradients"]["w"].zero_()
        assert same(parts, before)
        del before
    assert torch.cuda.memory_allocated(device) == held


def test_a_host_without_pinned_memory_to_give_gives_ordinary_memory(monkeypatch, caplog):
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
