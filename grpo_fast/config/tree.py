"""Trees of plain data, and dotted places in them: `rewards.0.weight`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves by their places; lists and empty mappings are leaves."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def with_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Copy a tree with each leaf changed."""
    if isinstance(tree, Mapping):
        return {key: with_leaves(value, change) for key, value in tree.items()}
    return [with_leaves(item, change) for item in tree] if isinstance(tree, list | tuple) else change(tree)


def value_at(tree: Any, place: str) -> Any:
    """Return the value at a place, or None."""
    for part in place.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else _items(tree).get(part)
    return tree


def differences(before: Any, now: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (place, before, now) of what differs; lists of different lengths differ as a whole."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        before, now = _items(before), _items(now)
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield place, before, now
        return
    for key in before | now:
        yield from differences(before.get(key), now.get(key), f"{place}.{key}" if place else str(key))


def _items(value: Any) -> dict[str, Any]:
    return {str(index): item for index, item in enumerate(value)} if isinstance(value, list) else {}
