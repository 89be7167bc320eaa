"""Trees of plain data, as files hold configurations, and the dotted places in them: `rewards.0.weight`.

Nothing is changed in place, for two places may share an object by a YAML alias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpo_fast.config.secrets import masked
from grpo_fast.config.section import short


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What stands at each place; lists and empty mappings are leaves."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


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


def merged(
    below: Any, above: Any, is_whole: Callable[[str], bool] = lambda place: False, place: str = ""
) -> Any:
    """One tree over another, key by key; the mapping at a place of which `is_whole` holds is replaced."""
    if not (isinstance(below, dict) and isinstance(above, dict)) or is_whole(place):
        return above
    inner = {
        key: merged(below.get(key), item, is_whole, f"{place}.{key}" if place else key)
        for key, item in above.items()
    }
    return below | inner


def with_value(tree: Any, place: str, value: Any, is_whole: Callable[[str], bool], here: str = "") -> Any:
    """A tree with the value at a place, over what is there as by `merged`.

    Raises:
        ValueError: the way there leads through a value, or past the end of a list.
    """
    if not place:
        return merged(tree, value, is_whole, here)
    part, _, rest = place.partition(".")
    below = f"{here}.{part}" if here else part
    if isinstance(tree, list):
        if not (part.isdigit() and int(part) < len(tree)):
            raise ValueError(f"{here} has {len(tree)} items, counted from 0, and none is `{part}`")
        changed = list(tree)
        changed[int(part)] = with_value(tree[int(part)], rest, value, is_whole, below)
        return changed
    if tree is not None and not isinstance(tree, dict):
        raise ValueError(f"{here} is {short(masked(tree, here))} and holds no keys; set the whole of {here}")
    tree = tree or {}
    return tree | {part: with_value(tree.get(part), rest, value, is_whole, below)}


def without(tree: Any, place: str) -> Any:
    """A tree without what stands at a place."""
    part, _, rest = place.partition(".")
    if not isinstance(tree, dict) or part not in tree:
        return tree
    if rest:
        return tree | {part: without(tree[part], rest)}
    return {key: value for key, value in tree.items() if key != part}
