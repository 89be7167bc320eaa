"""A host trainer's real source, and stand-ins for what it imports but its loss does not use.

Hosts that no package registry has come from checkouts: the environment variable GRPO_FAST_PEER_SOURCES names
a folder with one for each, `prime_rl` and `nemo_rl`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
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


def use_checkout(name: str, *folders: str) -> None:
    """Makes a checkout importable, here and in processes started from here, under its own version.

    Args:
        name: of the folder and of the package in it.
        folders: of the checkout that are to be imported from.
    """
    checkout = Path(os.environ.get("GRPO_FAST_PEER_SOURCES", "")) / name
    if "GRPO_FAST_PEER_SOURCES" not in os.environ or not checkout.is_dir():
        return
    paths = [str(checkout / folder) for folder in folders]
    version = re.search(r'^version = "(.+)"', (checkout / "pyproject.toml").read_text(), re.MULTILINE)
    if version is not None:
        installed = Path(tempfile.mkdtemp()) / f"{name}-{version[1]}.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version[1]}\n"
        )
        paths.append(str(installed.parent))
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


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
