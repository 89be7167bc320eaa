"""Where a measurement was made: versions, device, driver, clocks, revision, command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from grpo_fast.run_record.logs import provenance

from .timing import copy_bandwidth

PEER_PACKAGES = ("trl", "liger-kernel", "cut-cross-entropy", "verl", "quack-kernels", "unsloth-zoo")
_GPU_STATE = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "power.draw")


def environment(device: torch.device) -> dict[str, Any]:
    """Everything needed to judge or repeat a run; measures the copy bandwidth, a fraction of a second."""
    found = provenance() | {"command": _command(sys.argv)}
    found["versions"] |= {name: version for name in PEER_PACKAGES if (version := _version(name))}
    found["cuda"] = torch.version.cuda
    found["git"] = _git()
    found["benchmark_device"] = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else found["device"]
    )
    found["copy_gigabytes_per_second"] = copy_bandwidth(device) / 1e9
    return found


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """Clocks, temperature and power now; None without an NVIDIA driver's tool."""
    tool = shutil.which("nvidia-smi")
    if device.type != "cuda" or tool is None:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    line = _output(tool, f"--id={uuid}", f"--query-gpu={','.join(_GPU_STATE)}", "--format=csv,noheader")
    values = line.splitlines()[0].split(", ") if line else []
    return dict(zip(_GPU_STATE, values, strict=True)) if len(values) == len(_GPU_STATE) else None


def _command(arguments: Sequence[str]) -> list[str]:
    """As one would type it: no path of this machine, and not where the results went."""
    program, *options = arguments
    kept = [word for before, word in pairwise(["", *options]) if "--json" not in (before, word)]
    path = Path(program)
    if path.parent != Path(__file__).parent:
        return [path.name, *kept]
    module = "benchmarks" if path.stem == "__main__" else f"benchmarks.{path.stem}"
    return ["python", "-m", module, *kept]


def _git() -> dict[str, Any] | None:
    here = str(Path(__file__).parent)
    revision = _output("git", "-C", here, "rev-parse", "HEAD")
    if not revision:
        return None
    return {"revision": revision, "changed": bool(_output("git", "-C", here, "status", "--porcelain"))}


def _output(*command: str) -> str:
    """What a command prints, stripped; nothing where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
