"""Save checkpoints that survive a kill at any moment, and detect damaged ones.

A checkpoint is a folder `step-00000012` with safetensors files, `state.json`, and `manifest.json`, which has
the size and SHA-256 of each. Every rank writes its rows with torch's distributed checkpoints; any number of
ranks can read them. A save writes into `step-00000012.tmp`, flushes it and renames it, so that a folder with
its final name is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from grpo_fast.config.paths import user_path
from grpo_fast.distributed.shards import local
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.policy.optimizer import Diverged
from grpo_fast.policy.source import first_not_finite
from grpo_fast.record.files import sync, write_whole

logger = logging.getLogger(__name__)

T = TypeVar("T")
FORMAT = 2
MANIFEST, STATE = "manifest.json", "state.json"
FILE = 2**32  # approximate bytes of tensors in a file; the host holds a file twice while it is written
FINAL = re.compile(r"step-\d{8,}")
PARTIAL = ".tmp"  # suffix of a folder that is being written or deleted


class CheckpointError(Exception):
    """A checkpoint cannot be saved or found."""


class CheckpointSaveError(CheckpointError):
    """A save failed and left nothing behind. Earlier checkpoints are intact, so training can continue."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's files are not as they were saved."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are intact."""

    path: Path
    step: int
    tensors: Mapping[str, Tensor]  # shapes and dtypes, on the meta device
    state: Mapping[str, Any]  # JSON

    def load(self, wanted: Mapping[str, Tensor]) -> None:
        """Fill tensors by name; of a DTensor, read only this rank's rows."""
        with _as_raised():
            dcp.load(dict(wanted), storage_reader=HuggingFaceStorageReader(str(self.path)), no_dist=True)


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    Args:
        keep: how many checkpoints to keep. None opens the store for reading only.
        world: the ranks, which open the store, save and rewind together on a shared file system.
    """

    def __init__(self, root: Path, keep: int | None = None, world: World = SINGLE_PROCESS) -> None:
        self.root, self.keep, self.world = Path(root), keep, world
        if keep is not None:
            self._lead(self._clean)

    def paths(self, suffix: str = "") -> list[Path]:
        """Return the complete checkpoints, or the folders of steps with a suffix, oldest first."""
        names = self.root.iterdir() if self.root.is_dir() else ()
        return sorted((p for p in names if p.suffix == suffix and FINAL.fullmatch(p.stem)), key=step_of)

    def rewind(self, step: int) -> None:
        """Delete the checkpoints of later steps."""
        self._lead(lambda: self._delete(path for path in self.paths() if step_of(path) > step))

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint of a later step than any saved one, then delete those beyond `keep`.

        Args:
            tensors: of any dtype, device and stride, without shared memory: DTensors, or equal on every rank.
            state: JSON; rank 0's is saved.

        Raises:
            CheckpointSaveError: the disk is full or cannot be written.
            Diverged: a tensor holds NaN or infinity.
        """
        assert self.keep is not None, "this store was opened to read"
        for name in self._agreed(lambda: first_not_finite({n: local(t) for n, t in tensors.items()})):
            if name:
                raise Diverged(f"{name} holds NaN or infinity")
        path, content, outdated = self.root / f"step-{step:08d}", json.dumps(state).encode(), -self.keep
        try:
            self._write(path, tensors, content)
            self._lead(lambda: self._delete(self.paths()[:outdated]))
        except OSError as error:
            newest = next(reversed(self.paths()), None)
            kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint"
            where = f"rank {vars(error)['rank']}: " if self.world.size > 1 else ""
            raise CheckpointSaveError(f"{where}cannot save {path}: {error}; {kept}") from error
        return path

    def load_latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None where there is none; warn of damaged newer ones.

        Raises:
            DamagedCheckpoint: all checkpoints are damaged.
        """
        damaged: list[DamagedCheckpoint] = []
        for path in reversed(self.paths()):
            try:
                newest = self.load(path)
            except DamagedCheckpoint as error:
                damaged.append(error)
                continue
            for problem in damaged:
                logger.warning("%s; %s is taken", problem, path)
            return newest
        if damaged:
            remedy = "start anew in another output_dir"
            raise DamagedCheckpoint(f"no checkpoint in {self.root} is intact; {remedy}. {damaged[0]}")
        return None

    def load(self, path: str | Path) -> Checkpoint:
        """Verify one checkpoint: a path, or the name of one in this store.

        Raises:
            CheckpointError: there is no such checkpoint.
            DamagedCheckpoint: a file is missing or altered; the message names it.
        """
        given = user_path(path, "--resume")
        path = given if given.is_dir() else self.root / path
        if not path.is_dir() or not FINAL.fullmatch(path.name):
            known = ", ".join(p.name for p in self.paths()) or "none"
            raise CheckpointError(f"{path} is no checkpoint; {self.root} holds: {known}")
        verify(path)
        saved: dict[str, Any] = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(like.size, dtype=like.properties.dtype, device="meta")
            for name, like in saved.items()
        }
        return Checkpoint(path, step_of(path), tensors, json.loads((path / STATE).read_bytes()))

    def _write(self, path: Path, tensors: Mapping[str, Tensor], state: bytes) -> None:
        folder = path.with_suffix(PARTIAL)
        ends = accumulate(local(tensor).nbytes for tensor in tensors.values())
        places = {name: 1 + end // FILE for name, end in zip(tensors, ends, strict=True)}

        def write_rows() -> dict[str, dict[str, Any]]:
            """Write and flush this rank's files, and return their fingerprints by name."""
            writer = HuggingFaceStorageWriter(str(folder), places, save_distributed=True)
            contiguous: dict[str, Any] = {name: t.detach().contiguous() for name, t in tensors.items()}
            group, alone = self.world.objects, self.world.size == 1
            with _as_raised():
                dcp.save(contiguous, storage_writer=writer, process_group=group, no_dist=alone)
            shards = folder.glob(f"shard-{self.world.rank + 1:05d}-*")  # DCP's names for this rank
            return {file.name: fingerprint(file) for file in shards}

        def complete() -> None:
            write_whole(folder / STATE, state)
            files = {STATE: fingerprint(folder / STATE)} | {n: f for rank in written for n, f in rank.items()}
            manifest = {"format": FORMAT, "step": step_of(path), "files": files}
            write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
            sync(folder)
            folder.rename(path)
            sync(self.root)

        try:
            written = self._agreed(write_rows)
            self._lead(complete)
        finally:
            self._lead(self._clean)

    def _agreed(self, work: Callable[[], T]) -> list[T]:
        """Return every rank's result, or raise on every rank the first OSError."""

        def result_or_error() -> T | OSError:
            try:
                return work()
            except OSError as error:
                vars(error).setdefault("rank", self.world.rank)
                return error

        results: list[Any] = self.world.gather_from_all("the checkpoint", result_or_error)
        if errors := [result for result in results if isinstance(result, OSError)]:
            raise errors[0]
        return results

    def _lead(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, and return its result on all ranks."""
        results: list[Any] = self._agreed(work if self.world.is_main else lambda: None)
        return results[0]

    def _delete(self, paths: Iterable[Path]) -> None:
        for path in paths:
            # Renamed first, so that a kill leaves no incomplete checkpoint under a final name.
            shutil.rmtree(path.rename(path.with_suffix(PARTIAL)))

    def _clean(self) -> None:
        """Delete folders that a kill left incomplete."""
        for path in self.paths(PARTIAL):
            shutil.rmtree(path)


def verify(path: Path) -> list[str]:
    """Check the size and SHA-256 of a checkpoint's files, and return their names.

    Raises:
        DamagedCheckpoint: a file is missing or altered; the message names it.
        CheckpointError: another version wrote the checkpoint.
    """
    damaged = f"checkpoint {path} is damaged"
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        version, step, files = manifest["format"], manifest["step"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{damaged}: {MANIFEST} cannot be read ({error!r})") from None
    if version != FORMAT:
        remedy = "resume with the version of grpo_fast that wrote it"
        raise CheckpointError(f"{path} has format {version!r}, and this version reads {FORMAT}: {remedy}")
    if step != step_of(path) or STATE not in files:
        raise DamagedCheckpoint(f"{damaged}: {MANIFEST} describes another checkpoint")

    def is_as_saved(name: str) -> bool:
        with suppress(OSError):
            return fingerprint(path / name) == files[name]
        return False

    with ThreadPoolExecutor() as pool:
        for name, is_intact in zip(files, pool.map(is_as_saved, files), strict=True):
            if not is_intact:
                raise DamagedCheckpoint(f"{damaged}: {name} is missing, or not as it was saved")
    return list(files)


@contextmanager
def _as_raised() -> Iterator[None]:
    """Raise the causes of DCP's errors, and hide its warning that one process is not distributed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        rank, (raised, _) = next(iter(error.failures.items()))
        vars(raised)["rank"] = rank
        raise raised from None


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def fingerprint(file: Path) -> dict[str, Any]:
    """Return the size in bytes and the SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
        return {"bytes": stream.tell(), "sha256": digest.hexdigest()}
