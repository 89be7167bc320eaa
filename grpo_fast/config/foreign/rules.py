"""Rules that put a foreign key in our terms, and the tables (YAML) that most of them stand in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

Places = dict[str, Any]  # dotted name here -> value
Siblings = Mapping[str, Any]  # the keys beside one, with their values


NOTHING: tuple[Any, ...] = (None, False, "", [], {}, 0)  # values that ask for nothing


class NotApplicable(ValueError):
    """The key does not change what is learned: nothing has to be decided."""


@dataclass(frozen=True)
class Absent:
    """A foreign key without a place here, and what to do instead."""

    reason: str
    harmless: Sequence[Any] = ()  # values that ask for what holds here anyway
    decide: bool = False  # the key changes what is learned, so a person has to decide


# A function gets the value and the keys beside it. It gives no place when the value asks for what is so
# anyway, and raises ValueError, with the remedy, for a value without an equivalent.
Translate = Callable[[Any, Siblings], Places]
Rule = str | Translate | Absent  # a string is a place: the value stays, null sets nothing


def translate(rule: Rule, value: Any, siblings: Siblings) -> Places:
    """Our names and values for a foreign one.

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
    when_on: Any = ...,
    ignored: Sequence[Any] = (),
    values: Mapping[Any, Any] | None = None,
    otherwise: str = "",
    refused: str = "",
) -> Places:
    """A rule in the form of a table's entry.

    Args:
        to: the place.
        beside: the switch that must be on for the key to count, or `key=value` that must not be otherwise.
        when_on: what a switch chooses; off, it sets nothing.
        ignored: values that set nothing.
        values: what is written differently here, without `to` as several places. Others stay as they are,
        otherwise: or are refused with this reason.
        refused: the reason why a switch may only be off.
    """
    if refused and value:
        raise ValueError(refused)
    if beside and not _is_on(beside, siblings):
        raise NotApplicable(f"counts only with {beside}")
    if refused or value in ignored:
        return {}
    if when_on is not ...:
        return {to: when_on} if value else {}
    for known, ours in (values or {}).items():
        if value == known:
            return {to: ours} if to else dict(ours)
    if otherwise:
        raise ValueError(otherwise)
    return translate(to, value, siblings)


def _is_on(switch: str, siblings: Siblings) -> bool:
    key, equals, wanted = switch.partition("=")
    value = siblings.get(key)
    return value is None or str(value).lower() == wanted if equals else bool(value)


def load_yaml(name: str) -> dict[str, Any]:
    """A table that lies beside this file."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def rules_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Rule]]:
    """Rules by dotted name: a table holds places, reasons, and arguments of `by_table`.

    A reason stands in brackets, or after a question mark where a person has to decide.
    """
    for key, entry in table.items():
        if isinstance(entry, str):
            rule: Rule = Absent(entry[1:].strip(), NOTHING, decide=True) if entry.startswith("?") else entry
            yield f"{prefix}{key}", Absent(entry[1:-1]) if entry.startswith("(") else rule
        elif entry.keys() & {"to", "refused", "otherwise"}:
            yield f"{prefix}{key}", partial(by_table, **entry)
        else:
            yield from rules_of(entry, f"{prefix}{key}.")


def find_rule(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """The rule of a key, or the reason of the part that it belongs to, by the longest name that fits."""
    if key in rules:
        return rules[key]
    absent = [name for name, rule in rules.items() if isinstance(rule, Absent)]
    fitting = [
        name for name in absent if key.startswith(name.removesuffix("*") if "*" in name else f"{name}.")
    ]
    return rules[max(fitting, key=len)] if fitting else None
