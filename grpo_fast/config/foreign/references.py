"""OmegaConf references in NeMo-RL's files: `${policy.name}`, `${.sibling}`, `${mul:${a}, 2}`, `defaults:`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_fast.config.tree import merged

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")


def resolve(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves with their references replaced; one that leads nowhere or in a circle stays as written."""
    return {name: _resolved(name, value, leaves, frozenset()) for name, value in leaves.items()}


def with_defaults(
    document: Mapping[str, Any], folder: Path, read: Callable[[Path], Mapping[str, Any]]
) -> dict[str, Any]:
    """The document over the files that its `defaults:` names, where they lie beside it."""
    names = document.get("defaults")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(str(name).endswith((".yaml", ".yml")) for name in names):
        return dict(document)  # hydra's are names of the tool's own
    found: dict[str, Any] = {}
    for name in names:
        found = merged(found, with_defaults(read(folder / name), (folder / name).parent, read))
    return merged(found, {key: value for key, value in document.items() if key != "defaults"})


def _resolved(name: str, value: Any, leaves: Mapping[str, Any], waiting: frozenset[str]) -> Any:
    """`waiting`: the keys whose value waits for this one; a reference to one of them is a circle."""
    while isinstance(value, str) and (match := _INNERMOST.search(value)):
        found = _look_up(name, match.group(1), leaves, waiting | {name})
        if found is ...:
            return value
        whole = match.span() == (0, len(value))
        value = found if whole else f"{value[: match.start()]}{found}{value[match.end() :]}"
    return value


def _look_up(name: str, reference: str, leaves: Mapping[str, Any], waiting: frozenset[str]) -> Any:
    """The value of a reference in the value of `name`; `...` where it is not known."""
    function, colon, arguments = reference.partition(":")
    if colon:
        try:
            product = math.prod(map(float, arguments.split(",")), start=1.0)
        except ValueError:
            return ...
        return ... if function.strip() != "mul" else int(product) if product.is_integer() else product
    target = reference.strip()
    if target.startswith("."):
        dots = len(target) - len(target.lstrip("."))
        target = ".".join([*name.split(".")[:-dots], target.lstrip(".")])
    if target not in leaves or target in waiting:
        return ...
    # Resolved under its own name, to which a relative reference in it is relative.
    return _resolved(target, leaves[target], leaves, waiting)
