"""Names that users write: a function of theirs by import path, and what was probably meant."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any


def load_callable(path: str, key: str) -> Callable[..., Any]:
    """The function at `package.module:function`; `key` is the configuration's, for the error.

    Raises:
        ValueError: the path leads to no function.
    """
    module, colon, name = path.partition(":")
    try:
        if not colon:
            raise ImportError("there is no ':' in it")
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{key} = {path!r} cannot be imported ({error}); write it as 'package.module:function' and see "
            "that the module is on the Python path (PYTHONPATH=. for a file of this folder)"
        ) from error
    if not callable(function):
        raise ValueError(f"{key} = {path!r} is a {type(function).__name__}, not a function")
    return function


def choices(name: str, known: Iterable[str]) -> str:
    """`there are a, b, c; did you mean 'b'?`, the question only where a name is near."""
    names = sorted(known)
    listing = f"there are {', '.join(names)}" if names else "there are none"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"{listing}; did you mean {near[0]!r}?" if near else listing
