"""Trees of plain data, as files hold configurations, and the dotted places in them: `rewards.0.weight`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What stands at each place; lists and empty mappings are leaves."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def with_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a tree in which each leaf is changed."""
    if isinstance(tree, Mapping):
        return {key: with_leaves(value, change) for key, value in tree.items()}
    return [with_leaves(item, change) for item in tree] if isinstance(tree, list | tuple) else change(tree)


def value_at(tree: Any, place: str) -> Any:
    """What stands at a place; None where nothing does."""
    for part in place.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else _items(tree).get(part)
    return tree


def differences(before: Any, now: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(place, value before, value now) wherever two trees differ, of lists of other lengths as a whole."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        before, now = _items(before), _items(now)
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield place, before, now
        return
    for key in before | now:
        yield from differences(before.get(key), now.get(key), f"{place}.{key}" if place else str(key))


def _items(value: Any) -> dict[str, Any]:
    """Those of a list by their places."""
    return {str(index): item for index, item in enumerate(value)} if isinstance(value, list) else {}
