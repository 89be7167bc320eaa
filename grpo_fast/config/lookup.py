"""Find objects by name: a user's function by its import path, a package's public name, the nearest name."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.metadata
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_fast.config.paths import user_path

OBJECT_MARK = "@"  # in the name of an object that a Python call gave: `module:name@python`
FROM_PYTHON = f"{OBJECT_MARK}python"
_USER_FOLDERS: set[Path] = set()  # that code was imported from
_GIVEN: ContextVar[Mapping[str, Any]] = ContextVar("objects of a Python program, by name")


@contextmanager
def given(objects: Mapping[str, Any]) -> Iterator[None]:
    """Resolve these names to these objects inside of the context."""
    before = _GIVEN.set(objects)
    try:
        yield
    finally:
        _GIVEN.reset(before)


def load_callable(path: str, key: str) -> Callable[..., Any]:
    """Return the function or class that `load_object` finds.

    Raises:
        ValueError: there is none, or it cannot be called.
    """
    found = load_object(path, key)
    if not callable(found):
        raise ValueError(f"{key} = {path!r} is a {type(found).__name__}, not a function")
    return found


def load_once(path: str, key: str) -> Callable[..., Any]:
    """Return what `load_callable` does, but import each file once."""
    # Two Python calls may give two objects one name.
    return load_callable(path, key) if OBJECT_MARK in path else _imported(path, key)


_imported = cache(load_callable)


def load_object(path: str, key: str) -> Any:
    """Return the object at `package.module:name` or `path/to/file.py:name`, or `given` under this name.

    Args:
        key: the configuration's key, for the error.

    Raises:
        ValueError: there is none.
    """
    if path in (objects := _GIVEN.get({})):
        return objects[path]
    place, colon, name = (path, ":", "") if path.endswith(".py") else path.rpartition(":")
    if OBJECT_MARK in name:
        raise ValueError(
            f"{key} = {path!r} was an object of a Python call: repeat that call, or set {key} to an import "
            "path"
        )
    try:
        if not colon:
            raise ImportError("it has no ':'")
        module = _load_file(user_path(place, key)) if place.endswith(".py") else _load_module(place)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        problem = f"{type(error).__name__}: {error}{raised_at(error)}"
        raise ValueError(
            f"{key} = {path!r} cannot be imported ({problem}); write it as package.module:function, of a "
            "module on the Python path, or as path/to/file.py:function"
        ) from error
    if not hasattr(module, name):
        public = [known for known, value in vars(module).items() if callable(value) and known[0] != "_"]
        problem = f"{place} has no {name!r}" if name else f"write {place}:NAME"
        raise ValueError(f"{key} = {path!r}: {problem}: {choices(name, public)}")
    return getattr(module, name)


def raised_at(error: BaseException) -> str:
    """Return the innermost line of the user's file in an error's traceback, or an empty string."""
    libraries = (importlib, asyncio)
    machinery = (
        "<frozen",
        *(str(Path(str(m.__file__)).parent) for m in libraries),
        str(Path(__file__).parent.parent),  # the whole package
    )
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if not frame.filename.startswith(machinery)]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f", at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"grpo_fast_user_{path.stem}_{abs(hash(path)):x}"
    module = sys.modules[name] = ModuleType(name)  # dataclasses and typing look a class's module up there
    module.__file__ = str(path)
    try:
        with importing_from(path.parent):
            SourceFileLoader(name, str(path)).exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    if name.partition(".")[0] == __package__.partition(".")[0]:
        return importlib.import_module(name)
    with importing_from(Path.cwd()):
        return importlib.import_module(name)


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Put a folder first on the Python path, and afterwards last, for later imports.

    A module of the same name that was imported from another user folder is dropped.
    """
    _USER_FOLDERS.add(folder)
    for name, module in [*sys.modules.items()]:
        top = name.partition(".")[0]
        home = _home(sys.modules.get(top, module))
        holds = (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()
        if home != folder and home in _USER_FOLDERS and holds:
            del sys.modules[name]
    importlib.invalidate_caches()
    first = str(folder)
    sys.path.insert(0, first)
    try:
        yield
    finally:
        sys.path.remove(first)
        if first not in sys.path:
            sys.path.append(first)


def _home(module: ModuleType) -> Path | None:
    """Return the folder on the Python path that holds a top-level module."""
    file = Path(str(getattr(module, "__dict__", {}).get("__file__")))  # a lazy module may import by getattr
    return file.parent.parent if file.name == "__init__.py" else file.parent


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Raise RuntimeError in place of a SystemExit in a user's code, which would end the run silently."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(
            f"sys.exit({error.code!r}) was called{raised_at(error)}; return from this code, or raise another "
            "error"
        ) from error


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a package's `__getattr__` that imports a public name's module when the name is first used.

    Args:
        modules: the package's modules, and the public names that each defines.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


def requirements() -> Iterator[tuple[str, str, str]]:
    """Yield each requirement of the package with its module and its extra, or ""."""
    for line in importlib.metadata.requires("grpo-fast") or ():
        wanted, _, marker = line.partition(";")
        name = re.split(r"[^\w-]", wanted)[0]
        module = {"pyyaml": "yaml"}.get(name, name.replace("-", "_"))
        yield wanted.strip(), module, marker.rpartition("extra == ")[2].strip(" \"'")


def trainer_missing(error: ModuleNotFoundError) -> str | None:
    """Return how to install the trainer; None where it does not require the missing module."""
    missing, modules = str(error.name).partition(".")[0], set()
    with suppress(importlib.metadata.PackageNotFoundError):  # a checkout that is not installed
        modules = {module for _, module, extra in requirements() if extra == "train"}
    if missing not in modules:
        return None
    return f"needs the trainer, whose library {missing} is missing: pip install 'grpo-fast[train]'"


def choices(name: str, known: Iterable[str]) -> str:
    """Return `there are a, b, c; did you mean 'b'?`, the question only where a name is near."""
    names = sorted(known)
    listing = f"there are {', '.join(names)}" if names else "there are none"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"{listing}; did you mean {near[0]!r}?" if near else listing
