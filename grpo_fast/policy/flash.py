"""Variable-length flash-attention: of flash-attn where it is installed, else of torch."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.config.section import short
from grpo_fast.policy.layout import Sequences

logger = logging.getLogger(__name__)


class Package(NamedTuple):
    """A release of flash-attn, and the GPUs and heads that its backward supports."""

    distribution: str
    module: str
    capabilities: range  # majors
    widest_head: int


PACKAGES = {
    "flash_attention_4": Package("flash-attn-4", "flash_attn.cute", range(9, 13), 128),
    "flash_attention_3": Package("flash_attn_3", "flash_attn_interface", range(9, 10), 256),
    "flash_attention_2": Package("flash-attn", "flash_attn", range(8, 13), 256),
}
"""Releases by their name in `model.attention`, the newest first. torch has a copy of the last."""

TORCH = "flash_attention_2"


def installed(name: str) -> bool:
    """Return whether flash-attn itself, which supports softcaps, can be used."""
    return import_problem(name) is None


@cache
def import_problem(name: str) -> str | None:
    """Return why a package cannot be imported, or None. Log a broken one."""
    package = PACKAGES[name]
    try:
        importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"it needs {package.distribution}, which is not installed"
    try:
        import_module(package.module).flash_attn_varlen_func  # noqa: B018
    except Exception as error:  # it was built for another torch
        problem = f"{package.distribution} does not import: {short(str(error), 120)}"
        logger.warning("%s; install a build for torch %s, or uninstall it", problem, torch.__version__)
        return problem
    return None


def package_obstacle(name: str, major: int, widest_head: int) -> str | None:
    """Return why a package does not support heads of this size on a GPU of this capability, or None."""
    package = PACKAGES[name]
    if (problem := import_problem(name)) is not None:
        return problem
    if major not in package.capabilities:
        known = f"{package.capabilities[0]} to {package.capabilities[-1]}"
        return f"{package.distribution} is of compute capabilities {known}, and the GPU has {major}"
    if widest_head > package.widest_head:
        return f"{package.distribution} has heads of up to {package.widest_head} numbers, not {widest_head}"
    return None


def newest_flash(major: int, widest_head: int) -> str:
    """Return the name of the newest flash-attention that supports such heads on such a GPU."""
    fitting = (name for name in PACKAGES if package_obstacle(name, major, widest_head) is None)
    return next(fitting, TORCH)


def varlen_attention(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Attend causally: (T, A, D) and twice (K, key heads, D) in 16 bits on a GPU -> (T, A, D).

    The last query of a sequence is at its last key. A softcap needs flash-attn.
    """
    longest = max(2, sequences.longest_queries)  # 1 would be taken for decoding
    bounds = (sequences.queries, sequences.keys, longest, sequences.longest_keys)
    options = {} if softcap is None else {"softcap": softcap}
    return way(name)(query, key, value, *bounds, scaling, -1 if window is None else window - 1, **options)


@cache
def way(name: str) -> Callable[..., Tensor]:
    """Return a function of queries, keys, values, their bounds, the scale and the window's left."""
    if name != TORCH or installed(name):
        return partial(_package, import_module(PACKAGES[name].module).flash_attn_varlen_func)
    try:
        public: Any = import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return _torch_operator
    windows = {"scale", "window_size", "enable_gqa"} <= inspect.signature(public).parameters.keys()
    return partial(_torch_public, public) if windows else _torch_operator


def _package(function: Callable[..., Any], *given: Any, **softcap: float) -> Tensor:
    q, k, v, cu_q, cu_k, max_q, max_k, scale, left = given
    bounds = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    window = {} if left < 0 else {"window_size": (left, 0)}
    found = function(q, k, v, **bounds, softmax_scale=scale, causal=True, **window, **softcap)
    return found[0] if isinstance(found, tuple) else found  # some releases add the log-sum-exps


def _torch_public(function: Callable[..., Tensor], *given: Any) -> Tensor:
    *operands, scale, left = given
    return function(*operands, scale=scale, window_size=(left, 0), enable_gqa=True)


def _torch_operator(*given: Any) -> Tensor:
    *operands, scale, left = given
    window = {"window_size_left": left, "window_size_right": 0}
    # No dropout, causal, no debug mask.
    return torch.ops.aten._flash_attention_forward(*operands, 0.0, True, False, scale=scale, **window)[0]
