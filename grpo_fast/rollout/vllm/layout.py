"""Where each weight of a checkpoint lies in an engine's model: watched while it loads, not guessed.

Engines fuse (q, k, v into one tensor; gate and up into one), pad vocabularies, slice for tensor parallelism
and sometimes repack. Every loader ends in `Tensor.copy_`, so watching these copies tells for any architecture
which part of which weight went where. From that follow the fast synchronisation (the same copies again) and
shared weights (no copy: the trainer's parameter becomes that part of the engine's tensor).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Landing:
    """A part of one weight, and the place in the engine's memory that it was copied to."""

    name: str  # the checkpoint's
    target: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # into the weight, in elements

    def source(self, weight: Tensor) -> Tensor:
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)

    def load(self, weight: Tensor) -> None:
        self.target.copy_(self.source(weight))

    def holds(self, weight: Tensor) -> bool:
        """Whether the engine holds exactly this weight here."""
        return torch.equal(self.target, self.source(weight).to(self.target.dtype))

    def aliases(self, weight: Tensor) -> bool:
        """Whether the weight and the engine's tensor are the same memory."""
        source = self.source(weight)
        return source.data_ptr() == self.target.data_ptr() and source.stride() == self.target.stride()


class _Watcher(TorchDispatchMode):
    """Records what is copied out of the weight that was handed out last."""

    def __init__(self) -> None:
        super().__init__()
        self.landings: list[Landing] = []
        self._name = ""
        self._weight: Tensor | None = None

    def handing_out(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            self._name, self._weight = name, weight
            yield name, weight
        self._weight = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._weight is not None:
            target, source = args[:2]
            if storage_of(source) == storage_of(self._weight) and source.shape == target.shape:
                offset = source.storage_offset() - self._weight.storage_offset()
                place = Landing(self._name, target, tuple(source.shape), source.stride(), offset)
                self.landings.append(place)
        return func(*args, **(kwargs or {}))


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def watch_loading(load: Callable[[Weights], object], weights: Weights) -> list[Landing]:
    """Load `weights` with the engine's own loader; returns where they went, in order."""
    with _Watcher() as watcher:
        load(watcher.handing_out(weights))
    return watcher.landings


def live(model: nn.Module, landings: Iterable[Landing]) -> list[Landing]:
    """The landings in memory that the model still uses: a repacked weight has left its own."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {storage_of(tensor) for tensor in tensors if tensor.numel()}
    return [landing for landing in landings if storage_of(landing.target) in storages]


def size_in_bytes(model: nn.Module, *, without: Collection[int] = ()) -> int:
    """Of parameters and buffers, tied ones once, those in the storages `without` not at all."""
    storages = {storage_of(t): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    return sum(size for storage, size in storages.items() if storage not in without)


@torch.inference_mode(False)  # a view made in an engine's inference mode could never be trained
@torch.no_grad()
def share(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], landings: Sequence[Landing]
) -> list[Landing]:
    """Make engine and trainer use the same memory, where a whole weight is a contiguous part of a tensor.

    A tensor of one weight becomes the trainer's. A tensor of several, or with padding, moves to new memory,
    which the trainer's parameters become views of; each keeps its identity, shape and value.

    Args:
        model: the engine's, its weights loaded and not yet processed.
        parameters: the trainer's, by the checkpoint's names.

    Returns:
        The landings with their targets where they are now; `aliases` tells which are shared.
    """
    owners: dict[int, list[nn.Parameter]] = defaultdict(list)
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[storage_of(parameter)].append(parameter)
    by_storage: dict[int, list[Landing]] = defaultdict(list)
    for landing in landings:
        by_storage[storage_of(landing.target)].append(landing)
    times_landed = Counter(landing.name for landing in landings)
    moved = {}
    for storage, parts in by_storage.items():
        if not _is_plain(owners.get(storage, [])) or not all(
            times_landed[part.name] == 1 and _is_whole(part, parameters.get(part.name)) for part in parts
        ):
            continue
        tensor, first = owners[storage][0].data, parameters[parts[0].name]
        if len(parts) == 1 and first.numel() == tensor.numel():
            home = first.data.view(tensor.shape)
        else:
            home = torch.empty_like(tensor, requires_grad=False).copy_(tensor)
        for part in parts:
            shape = parameters[part.name].shape
            place = home.view(-1)[part.target.storage_offset() :][: part.target.numel()].view(shape)
            parameters[part.name].data = place
            moved[part.name] = replace(part, target=place, size=tuple(shape), stride=place.stride())
        for owner in owners[storage]:
            owner.data = home
    return [moved.get(landing.name, landing) for landing in landings]


def _is_plain(owners: Sequence[nn.Parameter]) -> bool:
    """One tensor, by however many names, that has its memory for itself."""
    return bool(owners) and all(
        owner.is_contiguous() and owner.storage_offset() == 0 and owner.shape == owners[0].shape
        for owner in owners
    )


def _is_whole(landing: Landing, parameter: nn.Parameter | None) -> bool:
    return (
        parameter is not None
        and parameter.is_contiguous()
        and landing.target.is_contiguous()
        and landing.target.numel() == parameter.numel()
        and landing.target.dtype == parameter.dtype
        and landing.target.device == parameter.device
    )
