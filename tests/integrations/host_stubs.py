"""Other trainers' real sources, and stand-ins for what they import but their losses do not use.

Hosts that no package registry has come from checkouts: the environment variable GRPO_FAST_PEER_SOURCES names
a folder with one for each, `prime_rl` and `nemo_rl`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

HEAVY = {
    "verl": "ray tensordict omegaconf hydra codetiming orjson torchdata cloudpickle",
    "openrlhf": "deepspeed flash_attn ray bitsandbytes torchdata pylatexenc jsonlines aiohttp",
    "nemo_rl": "ray tensordict megatron decord zmq pynvml mlflow swanlab wandb prometheus_client hydra",
    "prime_rl": "torchtitan loguru wandb",
    "slime": "ray sglang sglang_router",
    "skyrl": "ray flash_attn hydra tensordict megatron cloudpathlib fastapi",
}


_PROJECTS = {"prime_rl": "../../pyproject.toml", "slime": "../setup.py"}  # with the version, from the package


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
    """Makes a checkout, if there is one of the name, importable here and in processes started from here.

    Args:
        folders: of the checkout that are to be imported from.
    """
    if (sources := os.environ.get("GRPO_FAST_PEER_SOURCES")) and (checkout := Path(sources, name)).is_dir():
        paths = [str(checkout / folder) for folder in folders]
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
        _forget(*absent)
        importlib.invalidate_caches()


@contextmanager
def importable(host: str) -> Iterator[frozenset[str]]:
    """While open, the host imports without the libraries that its loss does not use, which are yielded.

    Not the whole of it: what patches transformers or lists its models when imported is left out, too.
    """
    with stubbed(*HEAVY[host].split()) as absent:
        if host == "nemo_rl":
            sys.modules["nemo_rl.models.policy"] = MagicMock()
        if host in _PROJECTS:
            found = importlib.import_module(host)
            project = Path(found.__path__[0], _PROJECTS[host])
            if project.is_file():  # of a checkout, which is not installed
                version = re.search(r'^\s*version ?= ?"(.+)"', project.read_text(), re.MULTILINE)
                found.__version__ = version[1]
        if host == "prime_rl":
            import prime_rl.trainer

            models = sys.modules["prime_rl.trainer.models"] = ModuleType("prime_rl.trainer.models")
            models.__path__ = [f"{path}/models" for path in prime_rl.trainer.__path__]
        try:
            yield absent
        finally:
            _forget(host)


def _forget(*names: str) -> None:
    """The next import of these packages, and of what is in them, is a first one."""
    for name in list(sys.modules):
        if name.partition(".")[0] in names:
            del sys.modules[name]
