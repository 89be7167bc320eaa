"""Foreign names and configurations (TRL, Axolotl, NeMo-RL) in our terms, every key accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_fast.convert.axolotl import read_axolotl
from grpo_fast.convert.conversion import Conversion
from grpo_fast.convert.nemo_rl import read_nemo_rl
from grpo_fast.convert.trl import read_trl

__all__ = ["Conversion", "convert", "recognise"]

READERS = {"axolotl": read_axolotl, "trl": read_trl, "nemo_rl": read_nemo_rl}


def convert(document: Mapping[str, Any], *, source: str | None = None) -> Conversion:
    """Our configuration from a foreign one, with an account of each key.

    Args:
        document: the foreign configuration as plain data.
        source: `axolotl`, `trl` or `nemo_rl`; by default recognised by the keys.

    Raises:
        ValueError: the configuration is ours already.
    """
    return READERS[source or recognise(document)](document)


def recognise(document: Mapping[str, Any]) -> str:
    """Whose configuration this is.

    Raises:
        ValueError: it is ours already.
    """
    sections = {key for key, value in document.items() if isinstance(value, Mapping)}
    if {"model", "dataset"} <= sections:
        raise ValueError("has our sections model and dataset already; `grpo-fast train` takes it as it is")
    if sections & {"algorithm", "policy", "grpo", "dpo"}:
        return "nemo_rl"
    return "axolotl" if {"base_model", "rl", "trl"} & set(document) else "trl"
