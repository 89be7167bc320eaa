"""Stand-ins for what a host trainer imports but its loss does not use, so that its real source runs here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock


class _StubFinder:
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> Any:
        stub = MagicMock(name=spec.name)
        stub.__spec__, stub.__path__ = spec, []
        return stub

    def exec_module(self, module: Any) -> None:
        pass


@contextmanager
def stubbed(*names: str) -> Iterator[frozenset[str]]:
    """While open, those of the top-level modules that are not installed import as mocks. Yields which."""
    absent = frozenset(name for name in names if name not in sys.modules and find_spec(name) is None)
    finder = _StubFinder(absent)
    sys.meta_path.append(finder)
    try:
        yield absent
    finally:
        sys.meta_path.remove(finder)
        for name in list(sys.modules):
            if name.partition(".")[0] in absent:
                del sys.modules[name]
        importlib.invalidate_caches()
