"""Where TRL's trainers project hidden states to log-probabilities, and how something else is put there.

GRPO, RLOO, DPO, KTO and SFT share one fused LM head. Its model forward looks two names up in
`trl.trainer.utils` on every call: the function itself, and whether to hand it only the rows that are scored.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

KNOWN_VERSIONS = ("1.15", "1.16")
"""Minor versions whose seam this is."""

HeadResults = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]

_FUNCTION = "_ChunkedLogProbFunction"
_COMPACTION = "_use_triton"  # absent in 1.15, which always compacts


class Head(Protocol):
    """What stands at the seam: TRL calls `apply` as it would call its autograd function's."""

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> HeadResults: ...


def require_trl() -> str:
    """The installed version of TRL.

    Raises:
        ImportError: there is none.
    """
    try:
        return importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            "grpo_fast.integrations.trl needs TRL, which is not installed: "
            f"pip install 'trl~={KNOWN_VERSIONS[-1]}.0'"
        ) from None


def trl_utils() -> ModuleType:
    """TRL's module with the seam.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: its version is not among `KNOWN_VERSIONS`.
    """
    version = require_trl()
    if ".".join(version.split(".")[:2]) not in KNOWN_VERSIONS:
        raise RuntimeError(
            f"TRL {version} is installed, but grpo_fast knows the fused LM head of TRL "
            f"{' and '.join(KNOWN_VERSIONS)} only: pip install 'trl~={KNOWN_VERSIONS[-1]}.0'"
        )
    return importlib.import_module("trl.trainer.utils")


def exchange(head: Head) -> dict[str, Any]:
    """Puts `head` at the seam and returns what stood there, for `restore`."""
    utils = trl_utils()
    before = {name: getattr(utils, name) for name in (_FUNCTION, _COMPACTION) if hasattr(utils, name)}
    setattr(utils, _FUNCTION, head)
    if _COMPACTION in before:
        triton_devices = before[_COMPACTION]

        def scores_live_rows_only(device: torch.device) -> bool:
            # TRL scores every row on CPU too; nothing is recompiled there when their number changes.
            return device.type == "cpu" or triton_devices(device)

        setattr(utils, _COMPACTION, scores_live_rows_only)
    return before


def restore(before: dict[str, Any]) -> None:
    """Puts the very objects back that `exchange` returned."""
    utils = trl_utils()
    for name, value in before.items():
        setattr(utils, name, value)


@contextmanager
def at_seam(head: Head) -> Iterator[None]:
    """`head` at the seam for as long as the block runs."""
    before = exchange(head)
    try:
        yield
    finally:
        restore(before)
