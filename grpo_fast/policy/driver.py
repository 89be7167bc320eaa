"""Why torch finds no GPU on a machine that has an NVIDIA driver."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

KERNEL_MODULE = Path("/proc/driver/nvidia/version")


def hidden_gpu() -> str | None:
    """Return why torch cannot use the machine's GPU; None: it can, or there is none.

    None, too, if CUDA_VISIBLE_DEVICES is empty or -1.
    """
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if hidden or (driver := driver_version()) is None:
        return None
    return (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and cannot use a GPU by the "
        f"NVIDIA driver {driver} of this machine. The driver may be too old for it: update the driver, or "
        "install a torch for an older CUDA (https://pytorch.org/get-started). In a container, give it the "
        "GPUs (docker run --gpus all)"
    )


def driver_version() -> str | None:
    """Return the version of the loaded NVIDIA driver, from its kernel module or nvidia-smi (WSL)."""
    if KERNEL_MODULE.exists():
        found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", KERNEL_MODULE.read_text(errors="replace"))
        return found[0] if found else "of unknown version"
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):  # no driver is loaded
        return None
    return next(iter(answer.stdout.split()), None)
