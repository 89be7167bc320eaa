"""Checkpoints that survive a kill at any moment, and say so when the disk has damaged one.

A checkpoint is a folder `step-00000012` of safetensors files, `state.json`, and `manifest.json` with the size
and SHA-256 of each. Every rank writes its own rows, by torch's distributed checkpoints, and any number of
ranks reads them. It is written under another name, flushed to the disk and renamed in one go: a folder with
its final name is complete. `step-00000012.weights` is the same with the trained weights alone, for which
there was room at the end of a run; it cannot be resumed. `step-00000012.damaged` was found to be so.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from grpo_fast.distributed.shards import local
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.policy.optimizer import Diverged
from grpo_fast.policy.source import first_not_finite
from grpo_fast.record.summary import bytes_text

logger = logging.getLogger(__name__)

T = TypeVar("T")
FORMAT = 2
MANIFEST, STATE = "manifest.json", "state.json"
FILE = 2**32  # bytes of tensors to a file, about: while one is written, the host's memory has it twice
FINAL = re.compile(r"step-(\d{8,})")
WRITING, DELETING, DAMAGED, WEIGHTS = ".tmp", ".del", ".damaged", ".weights"


class CheckpointError(Exception):
    """A checkpoint cannot be kept or found where it was asked for."""


class CheckpointSaveError(CheckpointError):
    """A save failed and left nothing behind. Earlier checkpoints are intact, so training may go on."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what was saved."""


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint."""

    path: Path
    step: int
    tensors: Mapping[str, Tensor]  # without their numbers, on the meta device
    state: Mapping[str, Any]  # JSON; nothing beside weights alone

    def load(self, wanted: Mapping[str, Tensor]) -> None:
        """Fill tensors that have names and shapes of saved ones; of a DTensor, read this rank's rows alone.

        Raises:
            DamagedCheckpoint: they are not finite.
        """
        with _as_raised():
            dcp.load(dict(wanted), storage_reader=HuggingFaceStorageReader(str(self.path)), no_dist=True)
        if name := first_not_finite({name: local(tensor) for name, tensor in wanted.items()}):
            raise DamagedCheckpoint(f"{self.path} is of a run that diverged: {name} is not finite")


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    Args:
        root: holds the checkpoints; made by the first save.
        keep: checkpoints to keep; what a killed save left is removed at once. None to read only.
        world: the ranks, which open it, save and rewind together. They share a file system.
    """

    def __init__(self, root: Path, keep: int | None = None, world: World = SINGLE_PROCESS) -> None:
        self.root, self.keep, self.world = Path(root), keep, world
        if keep is not None:
            self._lead(self._clean)

    def paths(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return self._named("")

    def check_room(self, size: int, saves: int) -> None:
        """Make sure that the checkpoints of a run fit, of `size` bytes each, which will write `saves`.

        A new run needs room for those it keeps and one that is being written; a run that goes on can do
        with two, for the oldest make room.

        Raises:
            CheckpointError: too little is free.
        """
        saved, keep = len(self.paths()), self.keep or 0
        count = 2 - saved if saved else min(keep + 1, saves)
        if (free := _free_bytes(self.root)) < count * size:
            raise CheckpointError(
                f"{self.root} has {bytes_text(free)} free; {count} of {bytes_text(size)} need "
                f"{bytes_text(count * size)}: checkpoint.keep = {keep}, and one being written. Make room, "
                "lower checkpoint.keep, or choose another output_dir"
            )

    def rewind(self, step: int) -> None:
        """Delete the checkpoints of later steps: a run resumed at this one is not on the way to them."""
        self._lead(lambda: self._delete(path for path in self.paths() if step_of(path) > step))

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any] | None) -> Path:
        """Write a checkpoint, then delete those beyond `keep`.

        Where the disk is full, the oldest checkpoint makes room if a newer one is intact.

        Args:
            step: optimiser steps done, more than of any that is saved.
            tensors: of any dtype, device and stride, no two of them the same memory: DTensors, or the same on
                every rank.
            state: whatever else, as JSON: rank 0's. None: the tensors are the trained weights alone, for
                which there is room where there is none for a checkpoint; the next one replaces them.

        Raises:
            CheckpointSaveError: the disk is full or cannot be written.
            Diverged: a tensor holds NaN or infinity.
            ValueError: the store was opened to read.
        """
        if self.keep is None:
            raise ValueError("this store was opened to read; give CheckpointStore a value for keep")
        for name in self._agreed(lambda: first_not_finite({n: local(t) for n, t in tensors.items()})):
            if name:
                raise Diverged(f"{name} holds NaN or infinity")
        path = self.root / f"step-{step:08d}{WEIGHTS if state is None else ''}"
        text = json.dumps(state or {})
        try:
            try:
                self._write(path, tensors, text)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._lead(self._make_room):
                    raise
                self._write(path, tensors, text)
            self._lead(lambda: self._delete_before(path))
        except OSError as error:
            free, saved = bytes_text(_free_bytes(self.root)), self.paths()
            newest = f"the newest checkpoint is {saved[-1]}" if saved else "there is no checkpoint"
            raise CheckpointSaveError(f"cannot save {path}: {error} ({free} free); {newest}") from error
        return path

    def load_latest(self) -> Checkpoint | None:
        """The newest checkpoint, or weights alone if they are newer; None where there is nothing.

        Raises:
            DamagedCheckpoint: the newest is damaged. The message names the newest intact one.
        """
        paths = self._named("", WEIGHTS)
        try:
            return self.load(paths[-1]) if paths else None
        except DamagedCheckpoint as error:
            intact = next(filter(_is_intact, reversed(paths[:-1])), None)
            remedy = f"the newest intact one is {intact}" if intact else "none before it is intact"
            raise DamagedCheckpoint(f"{error}; {remedy}") from error

    def load_intact(self) -> Checkpoint | None:
        """The newest intact checkpoint, to resume from; damaged newer ones are moved aside, which is logged.

        Raises:
            DamagedCheckpoint: there are checkpoints and all are damaged; all stay where they are.
        """
        damaged: dict[Path, DamagedCheckpoint] = {}
        for path in reversed(self.paths()):
            try:
                found = self.load(path)
            except DamagedCheckpoint as error:
                damaged[path] = error
                continue
            for bad, why in damaged.items():
                aside = bad.with_suffix(DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)  # of the same step, found earlier
                bad.rename(aside)
                logger.warning("%s; moved to %s, and %s is taken", why, aside, path)
            return found
        if damaged:
            newest = next(iter(damaged.values()))
            raise DamagedCheckpoint(
                f"no checkpoint in {self.root} is intact; start anew in another output_dir. {newest}"
            )
        return None

    def load(self, path: str | Path) -> Checkpoint:
        """Verify one checkpoint: a path, or the name of one in this store.

        Raises:
            CheckpointError: there is no such checkpoint.
            DamagedCheckpoint: a file is missing or altered; the message names it.
        """
        path = next((p for p in (Path(path), self.root / path) if p.is_dir()), None) or Path(path)
        if not path.is_dir() or not FINAL.fullmatch(path.stem) or path.suffix not in ("", WEIGHTS):
            known = ", ".join(p.name for p in self.paths()) or "none"
            raise CheckpointError(f"{path} is no checkpoint; {self.root} holds: {known}")
        verify(path)
        saved: dict[str, Any] = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(found.size, dtype=found.properties.dtype, device="meta")
            for name, found in saved.items()
        }
        return Checkpoint(path, step_of(path), tensors, json.loads((path / STATE).read_bytes()))

    def _named(self, *suffixes: str) -> list[Path]:
        """Folders of steps whose names end so, oldest first; of one step the checkpoint is the newest."""
        found = self.root.iterdir() if self.root.is_dir() else ()
        matching = (p for p in found if p.suffix in suffixes and FINAL.fullmatch(p.stem) and p.is_dir())
        return sorted(matching, key=lambda path: (step_of(path), not path.suffix))

    def _write(self, path: Path, tensors: Mapping[str, Tensor], state: str) -> None:
        folder = path.with_suffix(WRITING)
        ends = accumulate(local(tensor).nbytes for tensor in tensors.values())
        places = {name: 1 + end // FILE for name, end in zip(tensors, ends, strict=True)}

        def write_own() -> dict[str, dict[str, Any]]:
            """This rank's files, by name with their fingerprints."""
            writer = HuggingFaceStorageWriter(str(folder), places, save_distributed=True)
            contiguous: dict[str, Any] = {name: t.detach().contiguous() for name, t in tensors.items()}
            group, alone = self.world.objects, self.world.size == 1
            with _as_raised():
                dcp.save(contiguous, storage_writer=writer, process_group=group, no_dist=alone)
            own = sorted(folder.glob(f"shard-{self.world.rank + 1:05d}-*"))  # as DCP calls them
            for file in own:
                sync(file)
            return {file.name: fingerprint(file) for file in own}

        def complete() -> None:
            (folder / STATE).write_text(state, encoding="utf-8")
            files = {STATE: fingerprint(folder / STATE)} | {n: f for own in written for n, f in own.items()}
            manifest = {"format": FORMAT, "step": step_of(path), "files": files}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            for changed in (folder / STATE, folder / MANIFEST, folder):
                sync(changed)
            folder.rename(path)
            sync(self.root)

        try:
            written = self._agreed(write_own)
            self._lead(complete)
        finally:
            self._lead(self._clean)

    def _agreed(self, work: Callable[[], T]) -> list[T]:
        """Every rank's result, or on every rank the first one's OSError, for all to take the same way on."""

        def tried() -> T | OSError:
            try:
                return work()
            except OSError as error:
                return error

        found: list[Any] = self.world.gather_from_all("the checkpoint", tried)
        for result in found:
            if isinstance(result, OSError):
                raise result
        return found

    def _lead(self, work: Callable[[], T]) -> T:
        """Rank 0's result, which alone works."""
        found: list[Any] = self._agreed(work if self.world.is_main else lambda: None)
        return found[0]

    def _make_room(self) -> bool:
        """Delete the oldest checkpoint, damaged ones first, if a newer one is intact."""
        paths = [*self._named(DAMAGED), *self.paths()]
        if not any(map(_is_intact, reversed(paths[1:]))):
            return False
        logger.warning("the disk is full: %s is deleted to make room for the next", paths[0])
        self._delete(paths[:1])
        return True

    def _delete_before(self, path: Path) -> None:
        """What is not kept any more where `path` is saved."""
        weights = [other for other in self._named(WEIGHTS) if other != path]
        self._delete([*self.paths()[: -(self.keep or 0)], *weights])

    def _delete(self, paths: Iterable[Path]) -> None:
        for path in paths:
            # Renamed first: a kill in the middle must not leave half a checkpoint under a final name.
            shutil.rmtree(path.rename(path.with_suffix(DELETING)))

    def _clean(self) -> None:
        """Drop what a kill left half-written or half-deleted."""
        for path in self._named(WRITING, DELETING):
            shutil.rmtree(path)


def verify(path: Path) -> list[str]:
    """The names of a checkpoint's files, each of the size and SHA-256 it was saved with.

    Raises:
        DamagedCheckpoint: at the first file of which that is not true.
        CheckpointError: the checkpoint was written by a newer version.
    """
    damaged = f"checkpoint {path} is damaged"
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        version, step, files = manifest["format"], manifest["step"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
        raise DamagedCheckpoint(f"{damaged}: {problem}") from None
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version!r} and this version reads format {FORMAT}: "
            "resume with the version of grpo_fast that wrote it"
        )
    if step != step_of(path) or STATE not in files or any(Path(name).name != name for name in files):
        raise DamagedCheckpoint(f"{damaged}: {MANIFEST} describes another checkpoint")
    with ThreadPoolExecutor() as pool:
        hashed = {name: pool.submit(fingerprint, path / name) for name in files}
    for name, saved in files.items():
        try:
            found = hashed[name].result()
        except OSError as error:
            raise DamagedCheckpoint(f"{damaged}: {name} cannot be read ({error})") from None
        if found != saved:
            raise DamagedCheckpoint(f"{damaged}: {name} has {found}, and was saved with {saved}")
    return list(files)


@contextmanager
def _as_raised() -> Iterator[None]:
    """DCP's errors as they were raised, and no warnings: one process is no distributed one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def _is_intact(path: Path) -> bool:
    try:
        return bool(verify(path))
    except CheckpointError:
        return False


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.stem.removeprefix("step-"))


def fingerprint(file: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_bytes(folder: Path) -> int:
    """Bytes free where `folder` is, or will be."""
    return shutil.disk_usage(folder if folder.exists() else folder.parent).free
