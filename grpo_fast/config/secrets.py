"""Values that nobody else may read: hidden in whatever a run writes down, and given by variables.

Secret is what stands under a name that ends in key, token, secret or password, and the password in a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MASK = "***"
VARIABLE = re.compile(r"\$\{(\w+)\}")
_NAME = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)
# Words of the model's vocabulary, which are no secrets.
_SPECIAL = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask|stop|end|start|begin|image|audio|video)_token$")
_IN_URL = re.compile(
    r"(?P<before>\w+://[^\s/:@?#]*:)[^\s/@]+(?=@)|(?P<query>[?&][\w.-]*(key|token|secret|password)=)[^&\s#]+",
    re.IGNORECASE,
)

_HELD = re.compile(r"(key|token|secret|password)['\"]?\s*:", re.IGNORECASE)
_KEY = re.compile(r"(--)?[A-Za-z_][\w.-]*=")  # at the beginning of an override


def is_secret(name: str) -> bool:
    """Whether a key's value is hidden."""
    return bool(_NAME.search(name)) and not _SPECIAL.search(name)


def masked(value: Any, name: str = "", *, variables: bool = True) -> Any:
    """What may be shown of the value that stands under a key, however deep secrets lie in it.

    Args:
        variables: show names of variables, `${NAME}`, that stand for secrets.
    """

    def hidden(leaf: Any, name: str, _: str) -> Any:
        if not is_secret(name):
            if not isinstance(leaf, str):
                return leaf
            return _IN_URL.sub(lambda found: f"{found['before'] or found['query']}{MASK}", leaf)
        if leaf is None or isinstance(leaf, bool):
            return leaf
        return leaf if variables and isinstance(leaf, str) and VARIABLE.fullmatch(leaf) else MASK

    return _changed(value, name.rpartition(".")[2], "", hidden)


def in_use(options: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Options with the environment's values where `${NAME}` stands for them.

    Args:
        place: the key that holds them, for errors.

    Raises:
        ValueError: a variable that is not set, or a secret that was hidden.
    """

    def value_of(leaf: Any, name: str, key: str) -> Any:
        if not isinstance(leaf, str):
            return leaf
        if (leaf == MASK and is_secret(name)) or ("://" in leaf and re.search(r":\*\*\*@|=\*\*\*", leaf)):
            raise ValueError(
                f"{key} = {leaf!r} is hidden in a run's folder: give it again as {key}=VALUE, or as a "
                "variable of the environment, ${NAME}"
            )
        if (found := VARIABLE.fullmatch(leaf)) is None:
            return leaf
        if (variable := found[1]) not in os.environ:
            raise ValueError(f"{key} = {leaf!r}, and the environment has no {variable}: export {variable}")
        return os.environ[variable]

    return dict(_changed(options, "", place, value_of))


def masked_command(arguments: Sequence[str]) -> list[str]:
    """A command line as it may be shown: overrides `KEY=VALUE`, `--KEY=VALUE` and `--KEY VALUE` are known.

    A mapping or list that holds a secret is hidden as a whole.
    """
    shown, before = [], ""
    for argument in arguments:
        key, equals, text = argument.partition("=") if _KEY.match(argument) else (before, "", argument)
        name = key.lstrip("-").replace("-", "_").rpartition(".")[2]
        value = MASK if text[:1] in ("{", "[") and _HELD.search(text) else str(masked(text, name))
        shown.append(f"{key}={value}" if equals else value)
        before = argument if argument.startswith("--") and not equals else ""
    return shown


def _changed(value: Any, name: str, place: str, change: Callable[[Any, str, str], Any]) -> Any:
    """A tree with its leaves changed by their value, name and place; all below a secret's name have it."""
    if isinstance(value, Mapping):
        return {
            key: _changed(item, name if is_secret(name) else str(key), f"{place}.{key}", change)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed(item, name, f"{place}.{index}", change) for index, item in enumerate(value)]
    return change(value, name, place)
