"""What a run was made with: versions, device, command."""

from __future__ import annotations

import platform
import sys
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

PACKAGES = (
    "grpo-fast",
    "torch",
    "triton",
    "transformers",
    "peft",
    "datasets",
    "accelerate",
    "flash-attn",
    "liger-kernel",
    "vllm",
)


def provenance() -> dict[str, Any]:
    """One start of a run: UTC time, command line, Python, operating system, device, package versions."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": _device(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"CPU, {torch.get_num_threads()} threads"
