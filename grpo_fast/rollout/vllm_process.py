"""vLLM inside this process: one engine at a time, and the process left as it was.

Importing and starting vLLM sets environment variables, seeds every global generator, replaces
`torch.set_num_threads` on a CPU and logs at length.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_fast.checkpoint import capture_rng, restore_rng
from grpo_fast.rollout.vllm_version import installed_version, version_problem

# What decides, before vLLM is imported, that its engine lives in this process.
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"

_running: list[object] = []


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


@contextmanager
def starting() -> Iterator[None]:
    """Around the import of vLLM and the making of its engine, of which a process holds one.

    Raises:
        RuntimeError: an engine is running.
    """
    if _running:
        raise RuntimeError(
            "a vLLM engine is running in this process, and its memory pool allows one; close it first (use "
            "the engine as a context manager)"
        )
    os.environ.setdefault(IN_PROCESS, "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment = dict(os.environ)
    rng = capture_rng()
    set_num_threads, precision = torch.set_num_threads, torch.get_float32_matmul_precision()
    had_groups = torch.distributed.is_initialized()
    _running.append(object())
    try:
        yield
    except BaseException:
        _leave_no_groups(had_groups)
        _running.clear()
        raise
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_float32_matmul_precision(precision)
        restore_rng(*rng)
        # What vLLM set for itself it may read again; LD_PRELOAD and the like would reach child processes.
        own = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        os.environ.clear()
        os.environ.update(environment | own)


@contextmanager
def left_alone(device: torch.device) -> Iterator[None]:
    """torch's global random states stay as they are: vLLM draws from them even where seeds are given."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _leave_no_groups(there_before: bool) -> None:
    """A start that failed leaves its process groups, which the next one would trip over."""
    if there_before or not torch.distributed.is_initialized():
        return
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def stopped() -> None:
    """The engine is gone; another may start."""
    _running.clear()
