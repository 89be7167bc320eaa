"""vLLM inside this process: one engine at a time, and the process left as it was.

Importing and starting vLLM sets environment variables, seeds every global generator, replaces
`torch.set_num_threads` on a CPU and logs at length.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from grpo_fast.policy.random_state import capture_rng, restore_rng
from grpo_fast.rollout.vllm.version import installed_version, version_problem

# What decides, before vLLM is imported, that its engine lives in this process.
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# What the environment may say otherwise. FlashInfer's sampler gives no processed log-probabilities, and must
# not be looked for where it is not installed.
DEFAULTS = {
    IN_PROCESS: "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# A process that is alone talks to nobody, and starts where a host has no name or no network.
ALONE = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

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
def starting(*, alone: bool) -> Iterator[None]:
    """Around the import of vLLM and the making of its engine, of which a process holds one.

    Args:
        alone: vLLM uses no other process.

    Raises:
        RuntimeError: an engine is running.
    """
    if _running:
        raise RuntimeError(
            "a vLLM engine is running in this process, and its memory pool allows one; close it first (use "
            "the engine as a context manager)"
        )
    environment = dict(os.environ)
    for name, value in (DEFAULTS | (ALONE if alone and sys.platform == "linux" else {})).items():
        os.environ.setdefault(name, value)
    if settings := next((environment[name] for name in ALLOCATOR if name in environment), None):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings  # where vLLM looks for expandable segments
    rng = capture_rng()
    set_num_threads, precision = torch.set_num_threads, torch.get_float32_matmul_precision()
    had_groups = torch.distributed.is_initialized()
    _running.append(object())
    # vLLM gives its loggers the level only after a first import that logs already.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):  # vLLM's, of torch: not for us to heed
                warnings.simplefilter("ignore", category)
            yield
    except BaseException:
        _leave_no_groups(had_groups)
        _running.clear()
        raise
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_float32_matmul_precision(precision)
        restore_rng(*rng)
        _restore_environment(environment)
        if settings and torch.cuda.is_initialized():
            # vLLM limits how blocks are split while it loads, and before 0.31 drops every other setting.
            torch._C._accelerator_setAllocatorSettings(settings)


def _restore_environment(before: Mapping[str, str]) -> None:
    """What vLLM set for itself it may read again; LD_PRELOAD and the like would reach child processes."""
    for name in {*before, *os.environ}:
        if name.startswith("VLLM_") or os.environ.get(name) == before.get(name):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


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
