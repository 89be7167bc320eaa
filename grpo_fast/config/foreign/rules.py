"""Rules that translate a foreign key into ours; most of them are in YAML tables.

An entry of a table is one of these:

| entry | meaning |
|---|---|
| `section.key` | our key; the value stays |
| `(reason)` | no key here; the result is the same without it |
| `? reason` | no key here: a person has to decide, unless the value is null, false, 0 or empty |
| `{to: ..., values: ...}` | the arguments of `by_table` |
| `{options: {name: place}}` | a mapping; the table of its keys |
| another mapping | entries below this name |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

logger = logging.getLogger(__name__)
Places = dict[str, Any]  # dotted name here -> value
Siblings = Mapping[str, Any]  # the keys beside one, with their values

NOTHING: tuple[Any, ...] = (None, False, "", [], {}, 0)  # values that request nothing


class NotApplicable(ValueError):
    """The key does not change the result, so nothing has to be decided."""


@dataclass(frozen=True)
class Absent:
    """A foreign key without a place here, and what to do instead."""

    reason: str
    harmless: Sequence[Any] = ()  # values that are the behavior here
    decide: bool = False  # the key changes the result, so a person has to decide


# A function gets the value and the other keys of the file. It returns nothing for a value that holds here,
# and raises ValueError with the remedy for one without an equivalent.
Translate = Callable[[Any, Siblings], Places]
Rule = str | Translate | Absent  # a string is a place: the value stays, null sets nothing


def translate(rule: Rule, value: Any, siblings: Siblings) -> Places:
    """Return our names and values for a foreign one.

    Raises:
        ValueError: the key or its value has no place here; the message says why, or what to do instead.
    """
    if isinstance(rule, str):
        return {} if value is None else {rule: value}
    if not isinstance(rule, Absent):
        return rule(value, siblings)
    if value in rule.harmless:
        return {}
    raise (ValueError if rule.decide else NotApplicable)(rule.reason)


def by_table(
    value: Any,
    siblings: Siblings,
    *,
    to: str = "",
    beside: str = "",
    without: str = "",
    when_on: Any = ...,
    ignored: Sequence[Any] = (),
    values: Mapping[Any, Any] | None = None,
    otherwise: str = "",
) -> Places:
    """Translate a value by a table's entry; a null that `values` does not have sets nothing.

    Args:
        to: our key.
        beside: a key that must be true for this one to count, or `key=value`.
        without: the reason where it is not, in place of "counts only with".
        when_on: our value where theirs is true; false sets nothing.
        ignored: values that set nothing.
        values: theirs to ours; without `to`, theirs to several keys of ours. Other values stay,
        otherwise: or are refused for this reason.
    """
    values = values or {}
    if value in ignored or (value is None and None not in values):
        return {}
    if beside and not _is_on(beside, siblings):
        raise NotApplicable(without or f"counts only with {beside}")
    if when_on is not ...:
        return {to: when_on} if value else {}
    for ours in (ours for known, ours in values.items() if value == known):
        return {to: ours} if to else dict(ours)
    if otherwise:
        raise ValueError(otherwise)
    return {to: value}


def _is_on(switch: str, siblings: Siblings) -> bool:
    key, equals, wanted = switch.partition("=")
    value = siblings.get(key)
    return value is None or str(value).lower() == wanted if equals else bool(value)


def by_option(options: Mapping[str, Rule], value: Any, siblings: Siblings) -> Places:
    """Translate a mapping of options."""
    if unknown := [key for key in value or {} if key not in options]:
        raise ValueError(f"{', '.join(unknown)} has no place here; the options are {', '.join(options)}")
    found: Places = {}
    idle = []
    for key, item in (value or {}).items():
        try:
            found |= translate(options[key], item, siblings)
        except NotApplicable as reason:
            idle.append(f"{key}: {reason}")
    if idle and not found:
        raise NotApplicable("; ".join(idle))
    if idle:
        logger.warning("not used: %s", "; ".join(idle))
    return found


def load_yaml(name: str) -> dict[str, Any]:
    """Read a table from this folder."""
    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(Path(__file__).with_name(name).read_text(encoding="utf-8"), fast)


def rules_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Rule]]:
    """Yield a table's rules by dotted name."""
    for key, entry in table.items():
        name = f"{prefix}{key}"
        if isinstance(entry, str):
            rule: Rule = Absent(entry[1:].strip(), NOTHING, decide=True) if entry[0] == "?" else entry
            yield name, Absent(entry[1:-1]) if entry[0] == "(" else rule
        elif "options" in entry:
            yield name, partial(by_option, dict(rules_of(entry["options"])))
        elif entry.keys() & {"to", "otherwise"}:
            yield name, partial(by_table, **entry)
        else:
            yield from rules_of(entry, f"{name}.")


def find_rule(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """Find the rule of a key, else the reason of the longest section or pattern that it belongs to."""
    if key in rules:
        return rules[key]
    starts = {name: name.removesuffix("*") if "*" in name else f"{name}." for name in rules}
    fitting = [name for name in rules if isinstance(rules[name], Absent) and key.startswith(starts[name])]
    return rules[max(fitting, key=len)] if fitting else None
