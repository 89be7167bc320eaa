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
SIZE = TypeAdapter(Annotated[ByteSize, Field(ge=1)])  # such as 141GiB, 80GB or 512 MiB
CUDA_CONTEXT = int(0.51 * GIB)  # of a process with torch's kernels; measured on an H200 with CUDA 13
CGROUP = Path("/sys/fs/cgroup")
TABLES: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("tables.yaml").read_text("utf-8"))
"""Known GPUs and models."""


@dataclass(frozen=True, kw_only=True)
class DeviceBudget(Device):
    """The device of one rank, and the bytes that a run may use."""

    name: str
    total: int  # bytes
    host: int = sys.maxsize  # bytes of the host's memory for this rank
    ranks: int = 1  # each with a device like this


def device_budget(name: str | None = None) -> DeviceBudget:
    """Return the device to plan for.

    Args:
        name: a GPU of the table, such as `RTX-4090` or `rtx 4090`; a size, for a Hopper GPU of that many
            bytes; `cpu`; or None for this machine's device.

    Raises:
        ValueError: an unknown name.
    """
    if name is None and torch.cuda.is_available():
        return _this_gpu()
    if name is None or name.lower() == "cpu":
        return DeviceBudget("cpu", name="cpu", total=_host_memory())
    gpus = {_bare(known): (known, facts) for known, facts in TABLES["gpus"].items()}
    if _bare(name) in gpus:
        known, (mebibytes, capability, shared_memory) = gpus[_bare(name)]
        total = mebibytes << 20
    else:
        known, (_, capability, shared_memory) = name, TABLES["gpus"]["H100"]
        try:
            total = SIZE.validate_python("" if name.strip().isdigit() else name)  # "5080" is no size
        except ValueError:
            raise ValueError(
                f"gpu {name!r} is not known: give one of {', '.join(TABLES['gpus'])}, cpu, or a size such as "
                "141GiB or 80GB"
            ) from None
    return DeviceBudget("cuda", tuple(capability), shared_memory, has_triton=True, name=known, total=total)


def _bare(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def _this_gpu() -> DeviceBudget:
    """Return this GPU with its free memory; memory of this process counts as free."""
    index = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info()
    ours = min(total, free + torch.cuda.memory_reserved() + CUDA_CONTEXT)
    facts = vars(device_facts("cuda", index))
    return DeviceBudget(**facts, name=torch.cuda.get_device_name(index), total=ours, host=_host_memory())


def _host_memory() -> int:
    """Return the available bytes of the machine, or of its control group; cached files count as free."""
    free = psutil.virtual_memory().available
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        shares = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no group or no limit
        return free
    return min(free, limit - used + int(shares["inactive_file"]) + int(shares["active_file"]))
