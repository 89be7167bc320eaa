"""Foreign names and configurations (TRL, Axolotl, NeMo-RL, verl) in our terms, every key accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_fast.convert.axolotl import read_axolotl
from grpo_fast.convert.conversion import Conversion
from grpo_fast.convert.nemo_rl import read_nemo_rl
from grpo_fast.convert.trl import read_trl
from grpo_fast.convert.verl import read_verl

__all__ = ["Conversion", "convert", "recognise"]

READERS = {"axolotl": read_axolotl, "trl": read_trl, "nemo_rl": read_nemo_rl, "verl": read_verl}


def convert(document: Mapping[str, Any], *, source: str | None = None) -> Conversion:
    """Our configuration from a foreign one, with an account of each key.

    Args:
        document: the foreign configuration as plain data.
        source: `axolotl`, `trl`, `nemo_rl` or `verl`; by default recognised by the keys.

    Raises:
        ValueError: the configuration is ours already.
    """
    return READERS[source or recognise(document)](document)


def recognise(document: Mapping[str, Any]) -> str:
    """Whose configuration this is.

    Raises:
        ValueError: it is ours already, empty, or of a tool that is not converted.
    """
    if not document:
        raise ValueError("is empty")
    sections = {key for key, value in document.items() if isinstance(value, Mapping)}
    if {"model", "dataset"} <= sections:
        raise ValueError("has our sections model and dataset already; `grpo-fast train` takes it as it is")
    sections |= {key.partition(".")[0] for key in document if "." in key}  # of a command's overrides
    if {"algo", "ckpt"} & sections:
        raise ValueError("is OpenRLHF's, which is not converted; write the keys that matter by hand")
    if "actor_rollout_ref" in sections or "algorithm.adv_estimator" in document:
        return "verl"
    if sections & {"algorithm", "policy", "grpo", "dpo"}:
        return "nemo_rl"
    return "axolotl" if {"base_model", "rl", "trl"} & set(document) else "trl"
