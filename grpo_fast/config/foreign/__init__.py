"""Foreign names and configurations (TRL, Axolotl, NeMo-RL) in our terms, every key accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from grpo_fast.config.foreign import nemo_rl
from grpo_fast.config.foreign.axolotl import read_axolotl
from grpo_fast.config.foreign.conversion import Conversion
from grpo_fast.config.foreign.names import MOVED
from grpo_fast.config.foreign.rules import Absent, Rule
from grpo_fast.config.foreign.trl import PREFERENCE, read_trl

__all__ = ["Conversion", "convert", "recognise"]

READERS = {"axolotl": read_axolotl, "trl": read_trl, "nemo_rl": nemo_rl.read_nemo_rl}

# Keys of supervised fine-tuning alone: of TRL's and of reward models', and NeMo-RL's section.
SUPERVISED = (
    *("assistant_only_loss", "completion_only_loss", "dataset_text_field", "eval_packing", "packing"),
    *("packing_strategy", "chat_template_path", "max_seq_length", "center_rewards_coefficient"),
    *("sft", "rm"),
)
FLAT = "TRL, Axolotl"
TABLES = ((FLAT, MOVED), (FLAT, PREFERENCE), ("NeMo-RL", nemo_rl.RULES))
# With one of these values or another, every rule that is a function gives its places.
_PROBES: tuple[Any, ...] = (1, 0.5, True, "wandb", "owner/name", ["a"])


def convert(document: Mapping[str, Any], *, source: str | None = None) -> Conversion:
    """Our configuration from a foreign one, with an account of each key.

    Args:
        document: the foreign configuration as plain data.
        source: `axolotl`, `trl` or `nemo_rl`; by default recognised by the keys.

    Raises:
        ValueError: the configuration is ours already, or trains on answers that are given.
    """
    found = [key for key in SUPERVISED if key in document]
    if found and not document.keys() & {"num_generations", "grpo", "dpo"}:
        raise ValueError(f"trains on given answers ({found[0]}), and runs here on rewards or comparisons")
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
    sections |= {key.partition(".")[0] for key in document if "." in key}
    if {"algo", "ckpt"} & sections:
        raise ValueError("is OpenRLHF's, which is not converted; write the keys that matter by hand")
    if "actor_rollout_ref" in sections or "algorithm.adv_estimator" in document:
        raise ValueError("is verl's, which is not converted; write the keys that matter by hand")
    if sections & {"algorithm", "policy", "grpo", "dpo"}:
        return "nemo_rl"
    return "axolotl" if {"base_model", "rl", "trl"} & set(document) else "trl"


@cache
def names_of_peers() -> dict[str, dict[str, tuple[str, ...]]]:
    """Our dotted key -> the tools that have it -> their names."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for tools, rules in TABLES:
        for name, rule in rules.items():
            for place in sorted(set(_places(rule))):
                names = found.setdefault(place, {})
                names[tools] = tuple(dict.fromkeys([*names.get(tools, ()), name]))
    return found


def _places(rule: Rule) -> Iterator[str]:
    if isinstance(rule, str):
        yield rule
    elif "to" in getattr(rule, "keywords", ()):
        yield rule.keywords["to"]  # type: ignore[union-attr]
    elif not isinstance(rule, Absent):
        for value in _PROBES:
            try:
                yield from rule(value, {})
            except Exception:  # it has no equivalent of this value
                continue
