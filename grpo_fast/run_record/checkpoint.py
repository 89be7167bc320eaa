"""Checkpoints that survive a kill at any moment, and say so when the disk has damaged one.

A checkpoint is a folder `step-00000012` of one safetensors file for each group of tensors, `state.json`,
and `manifest.json` with the size and SHA-256 of each. It is written under another name, flushed to the
disk and renamed in one go: a folder with its final name is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_fast.run_record.summary import bytes_text

FORMAT = 1
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", ".safetensors"
FINAL = re.compile(r"step-(\d{8,})")
# Being written, being deleted, and set aside while another of the same step takes its place.
WRITING, DELETING, REPLACED = ".tmp", ".del", ".old"


class CheckpointError(Exception):
    """Checkpoints cannot be kept, or not be found, where they were asked for."""


class CheckpointSaveError(CheckpointError):
    """A save failed and left nothing behind. Earlier checkpoints are intact, so training may go on."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what was saved."""


@dataclass(frozen=True)
class Checkpoint:
    """What `CheckpointStore.save` was given, tensors on the CPU."""

    path: Path
    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # group -> name -> tensor
    state: Mapping[str, Any]  # JSON


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    Args:
        root: holds the checkpoints; made by the first save.
        keep: checkpoints to keep; what a killed save left is removed at once. None to read only.
    """

    def __init__(self, root: Path, keep: int | None = None) -> None:
        self.root, self.keep = Path(root), keep
        if keep is not None:
            self._clean()

    def paths(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = self.root.iterdir() if self.root.is_dir() else ()
        return sorted((path for path in found if FINAL.fullmatch(path.name) and path.is_dir()), key=step_of)

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then delete those beyond `keep`.

        One of the same step is replaced. Later ones, left from before the run was resumed at an earlier
        step, are deleted: the run is no longer on the way to them.

        Args:
            step: optimiser steps done.
            tensors: groups of tensors, a file each: any dtype, device, stride; tied ones are written twice.
            state: whatever else, as JSON.

        Raises:
            CheckpointSaveError: the disk is full or cannot be written.
            ValueError: the store was opened to read.
        """
        if self.keep is None:
            raise ValueError("this store was opened to read; give CheckpointStore a value for keep")
        path, encoded = self.root / f"step-{step:08d}", json.dumps(state)
        try:
            self._write(path, step, tensors, encoded)
            kept = [path for path in self.paths() if step_of(path) <= step][-self.keep :]
            for old in [path for path in self.paths() if path not in kept]:
                # Renamed first: a kill in the middle must not leave half a checkpoint under a final name.
                shutil.rmtree(old.rename(old.with_suffix(DELETING)))
        except (OSError, SafetensorError) as error:
            free = bytes_text(_free_bytes(self.root))
            raise CheckpointSaveError(
                f"cannot save {path}: {error} ({free} free); earlier checkpoints are intact"
            ) from error
        return path

    def load_latest(self) -> Checkpoint | None:
        """The newest checkpoint, if there is one.

        Raises:
            DamagedCheckpoint: the newest is damaged. The message names the newest intact one.
        """
        paths = self.paths()
        try:
            return self.load(paths[-1]) if paths else None
        except DamagedCheckpoint as error:
            intact = next(filter(_is_intact, reversed(paths[:-1])), None)
            remedy = "none before it is intact: start the run anew"
            if intact:
                remedy = f"the one before it is intact: --resume {intact}"
            raise DamagedCheckpoint(f"{error}; {remedy}") from error

    def load(self, path: str | Path) -> Checkpoint:
        """Verify and read one checkpoint: a path, or the name of one in this store.

        Raises:
            CheckpointError: there is no such checkpoint.
            DamagedCheckpoint: a file is missing or altered; the message names it.
        """
        path = next((p for p in (Path(path), self.root / path) if p.is_dir()), None) or Path(path)
        if not path.is_dir() or not FINAL.fullmatch(path.name):
            known = ", ".join(p.name for p in self.paths()) or "none"
            raise CheckpointError(f"{path} is no checkpoint; {self.root} holds: {known}")
        names = [name for name in verify(path) if name.endswith(TENSORS)]
        tensors = {name.removesuffix(TENSORS): load_file(path / name) for name in names}
        return Checkpoint(path, step_of(path), tensors, json.loads((path / STATE).read_bytes()))

    def _write(self, path: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: str) -> None:
        folder = path.with_suffix(WRITING)
        try:
            folder.mkdir(parents=True)
            for group, named in tensors.items():
                save_file(_unshared(named), folder / (group + TENSORS))
            (folder / STATE).write_text(state, encoding="utf-8")
            files = {file.name: fingerprint(file) for file in sorted(folder.iterdir())}
            manifest = {"format": FORMAT, "step": step, "files": files}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            for file in folder.iterdir():
                sync(file)
            sync(folder)
            if path.exists():
                path.rename(path.with_suffix(REPLACED))
            folder.rename(path)
            sync(self.root)
        finally:
            self._clean()

    def _clean(self) -> None:
        """Finish what a kill interrupted: put a replaced checkpoint back or drop it, drop the rest."""
        for path in list(self.root.iterdir()) if self.root.is_dir() else ():
            final = path.with_suffix("")
            if not FINAL.fullmatch(final.name):
                continue
            if path.suffix == REPLACED and not final.exists():
                path.rename(final)
            elif path.suffix in (WRITING, DELETING, REPLACED):
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
    for name, saved in files.items():
        try:
            found = fingerprint(path / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{damaged}: {name} cannot be read ({error})") from None
        if found != saved:
            raise DamagedCheckpoint(f"{damaged}: {name} has {found}, and was saved with {saved}")
    return list(files)


def _is_intact(path: Path) -> bool:
    try:
        return bool(verify(path))
    except CheckpointError:
        return False


def check_writable(root: Path, needed_bytes: int) -> None:
    """Make `root`, and make sure that so many bytes can be written there.

    Raises:
        CheckpointError: it cannot be written, or too little is free.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as probe:
            probe.write(b"\0")
            probe.flush()
    except OSError as error:
        raise CheckpointError(f"cannot write to {root}: {error}; choose another output_dir") from error
    if (free := _free_bytes(root)) < needed_bytes:
        raise CheckpointError(
            f"{root} needs {bytes_text(needed_bytes)} for a checkpoint and has {bytes_text(free)} free: "
            "make room or choose another output_dir"
        )


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


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


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, no two of the same storage: what safetensors accepts."""
    prepared: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        prepared[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return prepared


def _free_bytes(folder: Path) -> int:
    """Bytes free where `folder` is, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
