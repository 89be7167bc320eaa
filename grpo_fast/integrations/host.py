"""A host library of a known version, and the attributes of it that a patch replaces and gives back."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import ModuleType
from typing import Any

from grpo_fast.objective import GRPOLossConfig

_ABSENT = object()


def require(module: str, distribution: str, known: tuple[str, ...]) -> ModuleType:
    """Import a host library of a version this package was tested with.

    Args:
        module: what to import.
        distribution: the name it is installed under.
        known: version prefixes, such as "0.9".

    Raises:
        ImportError: the library is missing, or of another version.
    """
    try:
        host = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}); this adapter needs {distribution} {' or '.join(known)}"
        ) from error
    version = _version(host, distribution)
    if not any(version == prefix or version.startswith(f"{prefix}.") for prefix in known):
        raise ImportError(
            f"{distribution} is version {version}, but this adapter knows {' and '.join(known)} only; "
            f"install '{distribution}=={known[-1]}.*', or a newer grpo-fast"
        )
    return host


def _version(host: ModuleType, distribution: str) -> str:
    if isinstance(version := getattr(host, "__version__", None), str):
        return version
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            f"{distribution} is importable but not installed, so its version is unknown; install it with pip"
        ) from error


def require_config(config: GRPOLossConfig) -> None:
    """Raises TypeError for anything else, such as the bare name of a loss."""
    if not isinstance(config, GRPOLossConfig):
        raise TypeError(f"the loss must be a GRPOLossConfig, such as GRPOLossConfig('gspo'), got {config!r}")


class Replacements:
    """Attributes of modules, classes and instances that were replaced. As a context, undone at its end."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        """Whether anything is replaced now."""
        return bool(self._before)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Gives every owner its own object back; what it inherited, it inherits again."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __enter__(self) -> Replacements:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
