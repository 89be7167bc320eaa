"""What lies where in a run's folder, and how it is written there."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG_FILE = "config.yaml"
CHECKPOINTS_DIR = "checkpoints"


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file at once: whoever reads it, also after a kill, finds the old content or the new one."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
