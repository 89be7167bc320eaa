"""The memory to plan with: that of a GPU by name, of a given size, or of this machine's device, a rank's."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
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
"""Of a process that has loaded torch's kernels. Seen on an H200 with CUDA 13."""

CPU_LIBRARIES = 50 << 20
"""Of a process that trains on a CPU: buffers and code of torch's libraries. Seen with torch 2.13."""

CGROUP = Path("/sys/fs/cgroup")

TABLES: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("tables.yaml").read_text("utf-8"))
"""GPUs and models that can be planned for without having them."""


@dataclass(frozen=True, kw_only=True)
class DeviceBudget(Device):
    """A rank's device, and the bytes of it that a run may take."""

    name: str
    total: int  # bytes
    flops: float = 0.0  # a second, in 16 bits, as published; 0 of what the table does not have
    bandwidth: float = 0.0  # bytes a second
    link: float = 0.0  # bytes a second to the other GPUs of its node, each way
    host: int = sys.maxsize  # bytes that may be offloaded by all ranks of its node
    ranks: int = 1  # with a device like this each
    node: int = 8  # of them at most, that `link` joins
    context: int = CUDA_CONTEXT  # bytes of the process beside torch's allocator
    transient: float = 1.0  # factor of the predicted bytes of a micro-batch: see `calibrated`

    @property
    def host_share(self) -> int:
        """Bytes of its host's memory that each rank of a node may take."""
        return self.host // min(self.ranks, self.node)


def device_budget(name: str | None = None) -> DeviceBudget:
    """The device to plan for.

    Args:
        name: a GPU of the table in any usual spelling, `rtx4090` or `NVIDIA A100-SXM4-80GB`; a size, for a
            GPU of that many bytes (of Hopper's kind); `cpu`; or None for this machine's device.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name is None:
        return _gpu_at_hand() if torch.cuda.is_available() else _cpu_at_hand()
    if name.lower() == "cpu":
        return _cpu_at_hand()
    if known := _known_gpu(name):
        return known
    try:
        size = SIZE.validate_python("" if name.strip().isdigit() else name)  # 24 are GB, and 5080 is a name
    except ValueError:
        raise ValueError(
            f"gpu {name!r} is not known: give one of {', '.join(TABLES['gpus'])}, cpu, or a size such as "
            "141GiB or 80GB"
        ) from None
    _, capability, shared_memory, *_ = TABLES["gpus"]["H100"]
    return DeviceBudget("cuda", tuple(capability), shared_memory, has_triton=True, name=name, total=size)


def _known_gpu(name: str) -> DeviceBudget | None:
    """The table's GPU of this name, which may say its memory too, in the makers' round numbers."""
    given = _words(name)
    for known, (mebibytes, capability, shared_memory, *rates) in TABLES["gpus"].items():
        own = _words(known)
        memory = [int(word) if word.isdigit() else 0 for word in given[len(own) :]]
        if given[: len(own)] == own and all(abs((size << 10) / mebibytes - 1) < 0.1 for size in memory):
            units = {"flops": 1e12, "bandwidth": 1e9, "link": 1e9}
            speeds = {name: rate * units[name] for name, rate in zip(units, rates, strict=True)}
            facts = Device("cuda", tuple(capability), shared_memory, has_triton=True)
            return DeviceBudget(**vars(facts), name=known, total=mebibytes << 20, **speeds)
    return None


def _words(name: str) -> list[str]:
    """`RTX4090`, `rtx 4090` and `NVIDIA GeForce RTX 4090` alike."""
    told = re.sub(r"nvidia|geforce|rtx|generation|(sxm|hbm|pcie)\w*|(?<=\d)\s*gi?b\b", " ", name.lower())
    return re.findall(r"[a-z]+|\d+", told)


def _gpu_at_hand() -> DeviceBudget:
    """With the memory that other processes leave free; this one's own context and blocks count as free."""
    index = torch.cuda.current_device()
    facts = device_facts("cuda", index)
    free, total = torch.cuda.mem_get_info()
    ours = min(total, free + torch.cuda.memory_reserved() + CUDA_CONTEXT)
    name = torch.cuda.get_device_name(index)
    own = {**vars(facts), "name": name, "total": ours, "host": _cpu_at_hand().total}
    return replace(known, **own) if (known := _known_gpu(name)) else DeviceBudget(**own)


def _cpu_at_hand() -> DeviceBudget:
    """Available memory: of the machine, or of the control group that a container lives in."""
    total = min(psutil.virtual_memory().available, _left_by_control_group())
    return DeviceBudget("cpu", name="cpu", total=total, context=CPU_LIBRARIES)


def _left_by_control_group() -> int:
    """Bytes to the group's limit, not counting cached files, which make room; no end without a limit."""
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        shares = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return sys.maxsize
    return limit - used + int(shares["inactive_file"]) + int(shares["active_file"])
