"""Secrets: hidden in everything that a run writes, and read from environment variables.

A value is secret by its key (`api_key`, `token`, `password`, `authorization`), in a URL or a header, or as a
token of a well-known service.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MASK = "***"
VARIABLE = re.compile(r"\$\{(\w+)\}")
_ENDS = (
    r"(?:(?:\b|[_-]|api|access|private|secret)key|(?:[_-]|api)keys|token|secrets?|passwords?|passwd|passphrase|pwd|credentials?"
    r"|authorization|bearer|cookies?|(?:\b|[_-])auth|(?:\b|access|api|auth|bearer|hf|hub|id|refresh|secret|session|user)[_-]?tokens)"
)
_NAME = re.compile(f"{_ENDS}$", re.IGNORECASE)
# Special tokens, and keys of data, which are no secrets.
_SPECIAL = re.compile(
    r"(^|_)((bos|eos|pad|unk|sep|cls|mask|stop|end|start|begin|image|audio|video|think|thinking|tool|special)_token"
    r"|(answer|question|prompt|row|column|label|target|reward|metric|group|sort|cache|primary|foreign)_keys?)$"
)
_FREE = {"rename", "chat_template_kwargs"}  # mappings of columns, and of a template's variables
_COUNTS = ("keys", "tokens")  # not secret with a number
_PROSE = {"system_prompt", "prompt_template", "examples", "template", "chat_template", "stop"}
_IN_URL = re.compile(
    r"(?P<before>\w+://[^\s/:@?#]*:|https?://(?=[^\s/:]+@))[^\s/]+(?=@)"
    r"|(?P<query>[?&#](?P<name>[\w.-]+)=)[^&\s#'\"]+"
)
_HEADER = r"^(?:authorization|cookie|x-[\w-]*(?:key|token|secret)|api-key)\s*:\s*(?=.)"
_SERVICES = (
    r"\b(?:(hf_|npm_|sk-)(?=\w*\d)[A-Za-z0-9]{16,}|(sk-(?:proj|ant)-)[\w-]{16,}|(gh[opsu]_)\w{30,}"
    r"|(github_pat_)\w{20,}|(glpat-)[\w-]{16,}|(xox[abp]-)[\w-]{16,}|(A[KS]IA)[A-Z0-9]{16}|(AIza)[\w-]{35,})"
)
_FILLED = ("aA1" * 14, "A1" * 8)  # one of them matches any pattern of `_SERVICES`
_IN_TEXT = re.compile(
    rf"(?i:({_HEADER}).*|(^bearer\s+)\S+$|(\bbearer\s+)(?=\S*\d)[^\s'\",;]{{8,}}"
    rf"|(\bbasic\s+)(?:[\w+/]{{6,}}={{1,2}}|(?=[\w+/]*\d)[\w+/]{{16,}}))|{_SERVICES}",
    re.MULTILINE,
)
_PAIR = re.compile(
    rf"(?P<name>\b[\w-]*?{_ENDS})(?P<sign>['\"]?\s*[:=]\s*['\"\[]*)[^\s'\",;&)\]}}]+", re.IGNORECASE
)
_KEY = re.compile(r"(--)?[A-Za-z_][\w.-]*=")  # at the beginning of an override


def is_secret(name: str) -> bool:
    """Whether a key's value is secret."""
    return bool(_NAME.search(name)) and not _SPECIAL.search(name)


def redacted(text: str) -> str:
    """Return a text without passwords of URLs, headers' values and tokens of well-known services."""

    def of_url(found: re.Match[str]) -> str:
        if found["name"] and not (is_secret(found["name"]) or found["name"].lower().endswith("signature")):
            return found[0]
        return f"{found['before'] or found['query']}{MASK}"

    return _IN_TEXT.sub(lambda found: f"{found[found.lastindex or 0]}{MASK}", _IN_URL.sub(of_url, text))


def without_pairs(value: Any) -> Any:
    """Hide secrets in a value that may be a section written as text: `{api_key: ...}`."""

    def hidden(leaf: Any, *_: str) -> Any:
        if not isinstance(leaf, str):
            return leaf
        return _PAIR.sub(of_pair, leaf)

    def of_pair(found: re.Match[str]) -> str:
        return f"{found['name']}{found['sign']}{MASK}" if is_secret(found["name"]) else found[0]

    return _changed(value, "", "", hidden)


def masked(value: Any, name: str = "", *, variables: bool = True) -> Any:
    """Hide the secrets in a key's value, at any depth.

    Args:
        variables: keep `${NAME}` in the place of a secret.
    """

    def hidden(leaf: Any, name: str, place: str) -> Any:
        if not is_secret(name) or not _FREE.isdisjoint(place.split(".")):
            if not isinstance(leaf, str):
                return leaf
            return leaf if name in _PROSE else redacted(leaf)
        if leaf is None or isinstance(leaf, bool):
            return leaf
        if isinstance(leaf, int | float) and name.lower().endswith(_COUNTS):
            return leaf
        return leaf if variables and isinstance(leaf, str) and VARIABLE.fullmatch(leaf) else MASK

    return _changed(value, name.rpartition(".")[2], "", hidden)


def in_use(options: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Replace `${NAME}` in options by the environment's values.

    Args:
        place: the options' key, for errors.

    Raises:
        ValueError: a variable is not set, or a secret was hidden.
    """

    def value_of(leaf: Any, name: str, key: str) -> Any:
        if not isinstance(leaf, str):
            return leaf
        of_text = MASK in leaf and any(redacted(leaf.replace(MASK, text)) == leaf for text in _FILLED)
        if of_text or (leaf == MASK and is_secret(name)):
            raise ValueError(
                f"{key} = {leaf!r} is hidden in a run's folder: give it again as {key}=VALUE, or as an "
                "environment variable, ${NAME}"
            )
        if (found := VARIABLE.fullmatch(leaf)) is None:
            return leaf
        if (variable := found[1]) not in os.environ:
            raise ValueError(f"{key} = {leaf!r}, and the environment has no {variable}: export {variable}")
        return os.environ[variable]

    return dict(_changed(options, "", place, value_of))


def masked_command(arguments: Sequence[str]) -> list[str]:
    """Hide the secrets of a command line, in `KEY=VALUE`, `--KEY=VALUE` and `--KEY VALUE`.

    A mapping or list that holds a secret is hidden as a whole.
    """
    shown, before = [], ""
    for argument in arguments:
        key, equals, text = argument.partition("=") if _KEY.match(argument) else (before, "", argument)
        name = key.lstrip("-").replace("-", "_").rpartition(".")[2]
        value = MASK if text[:1] in ("{", "[") and without_pairs(text) != text else str(masked(text, name))
        shown.append(f"{key}={value}" if equals else value)
        before = argument if argument.startswith("--") and not equals else ""
    return shown


def _changed(value: Any, name: str, place: str, change: Callable[[Any, str, str], Any]) -> Any:
    """Change a tree's leaves by value, name and place; leaves below a secret name inherit it."""
    if isinstance(value, Mapping):
        return {
            key: _changed(item, name if is_secret(name) else str(key), f"{place}.{key}", change)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed(item, name, f"{place}.{index}", change) for index, item in enumerate(value)]
    return change(value, name, place)
