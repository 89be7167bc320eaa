"""What other tools call our keys, read out of the tables that convert theirs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from grpo_fast.convert.names import MOVED
from grpo_fast.convert.nemo_rl import RULES as NEMO_RL
from grpo_fast.convert.rules import Absent, Rule
from grpo_fast.convert.trl import PREFERENCE
from grpo_fast.convert.verl import RULES as VERL

FLAT = "TRL, Axolotl"
TABLES = ((FLAT, MOVED), (FLAT, PREFERENCE), ("NeMo-RL", NEMO_RL), ("verl", VERL))

# Between them these values make every rule that is a function say where it puts one.
_PROBES: tuple[Any, ...] = (1, 0.5, True, "wandb", "owner/name", ["a"])


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
