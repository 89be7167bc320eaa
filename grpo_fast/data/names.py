"""Error texts about names: what there is, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def choices(name: str, known: Iterable[str]) -> str:
    """`; there are a, b, c; did you mean 'b'?`, the question only where a name is near."""
    names = sorted(known)
    listing = f"there are {', '.join(names)}" if names else "there are none"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"{listing}; did you mean {near[0]!r}?" if near else listing
