"""The memory to plan with: that of a GPU by name, of a given size, or of this machine's device."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_fast.head.operator import device_facts
from grpo_fast.head.plan import Device

GIB = 1 << 30
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIB}

CUDA_CONTEXT = int(0.51 * GIB)
"""Of a process that has loaded torch's kernels. Seen on an H200 with CUDA 13."""

CGROUP = Path("/sys/fs/cgroup")

_AMPERE, _ADA, _HOPPER, _BLACKWELL, _GEFORCE_BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
# name: (MiB that the driver shows as total, compute capability)
GPUS: dict[str, tuple[int, tuple[int, int]]] = {
    "A100-40": (40960, _AMPERE),
    "A100-80": (81920, _AMPERE),
    "H100": (81559, _HOPPER),
    "H200": (143771, _HOPPER),
    "B200": (183359, _BLACKWELL),
    "L4": (23034, _ADA),
    "L40S": (46068, _ADA),
    "A10": (23028, (8, 6)),
    "RTX-3090": (24576, (8, 6)),
    "RTX-4090": (24564, _ADA),
    "RTX-5090": (32607, _GEFORCE_BLACKWELL),
    "RTX-6000-Ada": (49140, _ADA),
}
# Shared memory one program may use, which decides the head's tiles.
_SHARED_MEMORY = {_AMPERE: 166912, (8, 6): 101376, _ADA: 101376, _HOPPER: 232448, _BLACKWELL: 232448}


@dataclass(frozen=True)
class DeviceBudget:
    """A device, and the bytes of it that a run may take."""

    name: str
    kind: str  # "cuda" or "cpu"
    total: int  # bytes
    capability: tuple[int, int] = (0, 0)
    shared_memory: int = 0  # bytes one program may use

    @property
    def head_device(self) -> Device:
        """What the head's plan needs to know of it."""
        return Device(self.kind, self.capability, self.shared_memory, has_triton=self.kind == "cuda")


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `141GiB`, `80GB` or `512 MiB`; powers of ten and of two are told apart.

    Raises:
        ValueError: no number with a known unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is no size; write a number and B, KB, MB, GB, KiB, MiB or GiB, as 141GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def format_bytes(count: float) -> str:
    """`1.50 GiB`, `12.0 MiB`, `512 B`."""
    for unit, size, digits in (("GiB", GIB, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1)):
        if abs(count) >= size:
            return f"{count / size:,.{digits}f} {unit}"
    return f"{count:.0f} B"


def device_budget(name: str | None = None) -> DeviceBudget:
    """The device to plan for.

    Args:
        name: a GPU in `GPUS`, in any case and with or without its `RTX-`; a size, for a GPU of that many
            bytes (of Hopper's kind); `cpu`; or None for this machine's device.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name is None:
        return _gpu_at_hand() if torch.cuda.is_available() else _cpu_at_hand()
    if name.lower() == "cpu":
        return _cpu_at_hand()
    known = {gpu.lower().removeprefix("rtx-"): gpu for gpu in GPUS}
    key = name.lower().removeprefix("rtx-")
    if key in known:
        mebibytes, capability = GPUS[known[key]]
        return _gpu(known[key], mebibytes << 20, capability)
    try:
        return _gpu(name, parse_bytes(name), _HOPPER)
    except ValueError:
        raise ValueError(
            f"gpu {name!r} is not known: give one of {', '.join(GPUS)}, cpu, or a size such as 141GiB or 80GB"
        ) from None


def _gpu(name: str, total: int, capability: tuple[int, int]) -> DeviceBudget:
    return DeviceBudget(name, "cuda", total, capability, _SHARED_MEMORY.get(capability, 101376))


def _gpu_at_hand() -> DeviceBudget:
    """What others left of it; this process' own context and blocks are its to plan with."""
    index = torch.cuda.current_device()
    facts = device_facts("cuda", index)
    free, total = torch.cuda.mem_get_info()
    ours = min(total, free + torch.cuda.memory_reserved() + CUDA_CONTEXT)
    return DeviceBudget(
        torch.cuda.get_device_name(index), "cuda", ours, facts.capability, facts.shared_memory
    )


def _cpu_at_hand() -> DeviceBudget:
    """Available memory: of the machine, or of the control group that a container lives in."""
    import psutil

    return DeviceBudget("cpu", "cpu", min(psutil.virtual_memory().available, _left_by_control_group()))


def _left_by_control_group() -> int:
    """Bytes to the group's limit, not counting cached files, which make room; no end without a limit."""
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        shares = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return sys.maxsize
    return limit - used + int(shares["inactive_file"]) + int(shares["active_file"])
