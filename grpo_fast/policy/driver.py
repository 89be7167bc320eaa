"""Why torch finds no GPU on a machine that has an NVIDIA driver."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# Files of a loaded driver: on Linux, and in the Windows subsystem for Linux.
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/nvidia-smi"))


def hidden_gpu() -> str | None:
    """Return why torch cannot use the machine's GPU; None: it can, or there is none.

    None, too, if CUDA_VISIBLE_DEVICES is empty or -1.
    """
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if hidden or not any(driver.exists() for driver in DRIVERS):
        return None
    return (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and cannot use a GPU by the "
        "NVIDIA driver of this machine, which may be too old (nvidia-smi prints its version): update the "
        "driver, or install a torch for an older CUDA (https://pytorch.org/get-started). In a container, "
        "give it the GPUs (docker run --gpus all)"
    )
