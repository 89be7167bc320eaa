"""The device to plan for: a GPU by name, a GPU of a given size, or the device of this machine."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import yaml
from pydantic import ByteSize, Field, TypeAdapter

from grpo_fast.head.operator import device_facts
from grpo_fast.head.plan import Device

GIB = 1 << 30
SIZE = TypeAdapter(Annotated[ByteSize, Field(ge=1)])
"""Bytes of a size such as `141GiB`, `80GB` or `512 MiB`; powers of ten and of two are told apart."""

CUDA_CONTEXT = int(0.51 * GIB)
"""Bytes of a process that has loaded torch's kernels. Measured on an H200 with CUDA 13."""

CGROUP = Path("/sys/fs/cgroup")

TABLES: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("tables.yaml").read_text("utf-8"))
"""GPUs and models that can be planned for without having them."""


@dataclass(frozen=True, kw_only=True)
class DeviceBudget(Device):
    """The device of one rank, and the bytes that a run may take of it."""

    name: str
    total: int  # bytes
    host: int = sys.maxsize  # bytes of the host's memory that this rank may take
    ranks: int = 1  # each with a device like this


def device_budget(name: str | None = None) -> DeviceBudget:
    """Return the device to plan for.

    Args:
        name: a GPU of the table in any usual spelling, `rtx4090` or `NVIDIA A100-SXM4-80GB`; a size, for a
            GPU of that many bytes and of Hopper's kind; `cpu`; or None for this machine's device.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name is None and torch.cuda.is_available():
        return _this_gpu()
    if name is None or name.lower() == "cpu":
        return DeviceBudget("cpu", name="cpu", total=_host_memory())
    if known := _known_gpu(name):
        return known
    try:
        size = SIZE.validate_python("" if name.strip().isdigit() else name)  # "5080" is a name, not a size
    except ValueError:
        raise ValueError(
            f"gpu {name!r} is not known: give one of {', '.join(TABLES['gpus'])}, cpu, or a size such as "
            "141GiB or 80GB"
        ) from None
    _, capability, shared_memory = TABLES["gpus"]["H100"]
    return DeviceBudget("cuda", tuple(capability), shared_memory, has_triton=True, name=name, total=size)


def _known_gpu(name: str) -> DeviceBudget | None:
    """Return the table's GPU of this name, which may end in its memory in round numbers."""
    given = _words(name)
    for known, (mebibytes, capability, shared_memory) in TABLES["gpus"].items():
        own = _words(known)
        memory = [int(word) if word.isdigit() else 0 for word in given[len(own) :]]
        if given[: len(own)] == own and all(abs((size << 10) / mebibytes - 1) < 0.1 for size in memory):
            facts = ("cuda", tuple(capability), shared_memory)
            return DeviceBudget(*facts, has_triton=True, name=known, total=mebibytes << 20)
    return None


def _words(name: str) -> list[str]:
    """Split `RTX4090`, `rtx 4090` and `NVIDIA GeForce RTX 4090` into the same words."""
    bare = re.sub(r"nvidia|geforce|rtx|generation|(sxm|hbm|pcie)\w*|(?<=\d)\s*gi?b\b", " ", name.lower())
    return re.findall(r"[a-z]+|\d+", bare)


def _this_gpu() -> DeviceBudget:
    """Return this GPU with the memory that other processes leave; this process's own counts as free."""
    index = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info()
    ours = min(total, free + torch.cuda.memory_reserved() + CUDA_CONTEXT)
    facts = vars(device_facts("cuda", index))
    return DeviceBudget(**facts, name=torch.cuda.get_device_name(index), total=ours, host=_host_memory())


def _host_memory() -> int:
    """Return the available bytes: of the machine, or up to the limit of a container's control group.

    Cached files do not count as used, because the kernel drops them for room.
    """
    free = psutil.virtual_memory().available
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        shares = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return free
    return min(free, limit - used + int(shares["inactive_file"]) + int(shares["active_file"]))
