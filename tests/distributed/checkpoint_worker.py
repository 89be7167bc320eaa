"""Checkpoints of one rank and of several: `python checkpoint_worker.py FOLDER SEED`.

One process imports what takes seconds, and forks.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fork import fork
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from grpo_fast.config.policy import OptimizerConfig
from grpo_fast.distributed.shards import as_sharded, rows_of
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.policy import PolicyOptimizer
from grpo_fast.policy.optimizer import Diverged
from grpo_fast.record import checkpoint
from grpo_fast.record.checkpoint import MANIFEST, CheckpointSaveError, CheckpointStore, verify

SHAPES = {"wide": (7, 5), "row": (1, 6), "vector": (9,), "experts": (2, 3, 4), "unreached": (4, 4)}
SHAPES["long"] = (7, 1500)  # of each of two ranks enough for moments of 8 bits
HALF = ("wide", "vector", "unreached")  # of 16 bits


def build(
    world: World, seed: int, *, kind: str = "adamw", sharded: bool = False
) -> tuple[dict[str, nn.Parameter], PolicyOptimizer]:
    rng = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, shape in SHAPES.items():
        weight = torch.randn(shape, generator=rng).to(torch.bfloat16 if name in HALF else torch.float32)
        rows = rows_of(weight, world).clone()
        parameters[name] = nn.Parameter(as_sharded(rows, weight.shape, world) if sharded else weight)
    return parameters, PolicyOptimizer(parameters, OptimizerConfig(kind=kind), total_steps=9, world=world)


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in tensors.items()}


def save(folder: Path, seed: int, world: World, *, kind: str = "adamw") -> None:
    """Two steps with a checkpoint each, and beside the second what it holds."""
    parameters, optimizer = build(world, seed, kind=kind)
    store = CheckpointStore(folder / kind / f"by {world.size}", 1, world)
    rng = torch.Generator().manual_seed(seed + world.rank)
    for step in (1, 2):
        for name, parameter in parameters.items():
            if name != "unreached":
                (parameter * torch.randn(parameter.shape, generator=rng)).sum().backward()
        optimizer.step()
        path = store.save(step, optimizer.state_tensors(), {"by": world.rank})
    assert store.paths() == [path]
    assert {*verify(path), MANIFEST} == {file.name for file in path.iterdir()}
    expected = whole(optimizer.state_tensors()), whole(parameters)
    world.from_main("what is expected", lambda: torch.save(expected, store.root / "expected"))


def resume(
    folder: Path, seed: int, world: World, *, by: int, kind: str = "adamw", sharded: bool = False
) -> None:
    """From a checkpoint of so many ranks: the same numbers, to the bit."""
    parameters, optimizer = build(world, seed + 1, kind=kind, sharded=sharded)
    store = CheckpointStore(folder / kind / f"by {by}", 1, world)
    found = world.from_main("the checkpoint", store.load_latest)
    assert found is not None and found.state == {"by": 0}
    optimizer.load_state_tensors(found.tensors, found.load)
    for expected, ours in zip(
        torch.load(store.root / "expected"), (optimizer.state_tensors(), parameters), strict=True
    ):
        torch.testing.assert_close(whole(ours), expected, rtol=0, atol=0)


def failing_once(work: Callable[..., Any], errors: list[OSError]) -> Callable[..., Any]:
    def tried(*given: Any) -> Any:
        if errors:
            raise errors.pop()
        return work(*given)

    return tried


def fail(folder: Path, seed: int, world: World) -> None:
    """What one rank cannot write, all have not saved."""
    store = CheckpointStore(folder / "failed", 3, world)
    rows = rows_of(torch.arange(24.0).view(8, 3), world).clone()
    tensors = {"master.weight": as_sharded(rows, torch.Size([8, 3]), world)}
    for step in (1, 2):
        store.save(step, tensors, {})
    unlucky = seed % world.size
    for place, name in ((FileSystem, "create_stream"), (checkpoint, "fingerprint")):
        original, errors = getattr(place, name), [OSError(errno.EIO, "broken")] * (world.rank == unlucky)
        fails_once = patch.object(place, name, failing_once(original, errors))
        said = f"^rank {unlucky}: cannot save .*step-00000003: .*broken"
        with fails_once, pytest.raises(CheckpointSaveError, match=said):
            store.save(3, tensors, {})
        assert sorted(path.name for path in store.root.iterdir()) == ["step-00000001", "step-00000002"]
        world.gather_from_all("looked", lambda: None)
    rows[:] = torch.nan if world.rank == unlucky else 0.0
    with pytest.raises(Diverged, match=r"master\.weight"):
        store.save(4, tensors, {})


EIGHT = "adamw_8bit"
resume_eight = partial(resume, by=2, kind=EIGHT)  # by another number of ranks the blocks are others
WORLDS: Sequence[tuple[int, list[Any]]] = (
    (1, [save]),
    (2, [save, fail, partial(resume, by=1), partial(resume, by=2), partial(save, kind=EIGHT), resume_eight]),
    (4, [partial(resume, by=1, sharded=True), partial(resume, by=2)]),
    (1, [partial(resume, by=2)]),
)


def main(world: World, folder: Path, seed: int, checks: Sequence[Callable[..., None]]) -> None:
    for check in checks:
        check(folder, seed, world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # torchao would compile its step for each shape
    for size, checks in WORLDS:
        arguments = (Path(sys.argv[1]), int(sys.argv[2]), checks)
        if size == 1:  # what is imported on the way, the others have too
            main(SINGLE_PROCESS, *arguments)
        else:
            fork(main, size, *arguments)
