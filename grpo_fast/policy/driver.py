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
    """Return why torch, built for CUDA, cannot use the machine's GPU; None: it can, or there is none.

    Where CUDA_VISIBLE_DEVICES is empty or -1, the CPU was asked for.
    """
    built_for = torch.version.cuda
    if built_for is None or torch.cuda.is_available():
        return None
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    driver = driver_version()
    if driver is None:
        return None
    return (
        f"torch {torch.__version__} is built for CUDA {built_for} and cannot use a GPU by the NVIDIA driver "
        f"{driver} of this machine. The driver may be too old for it: update the driver, or install a torch "
        "for an older CUDA (https://pytorch.org/get-started). In a container, give it the GPUs "
        "(docker run --gpus all)"
    )


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver that is loaded, by its kernel module or nvidia-smi (WSL)."""
    if KERNEL_MODULE.exists():
        found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", KERNEL_MODULE.read_text(errors="replace"))
        return found[0] if found else "of unknown version"
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    question = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):  # installed, and no driver is loaded
        return None
    return next(iter(answer.stdout.split()), None)
