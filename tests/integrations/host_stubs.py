"""Other trainers' real sources, with mocks for the libraries that they import and their losses do not use.

Hosts that no package registry has come from checkouts: the environment variable GRPO_FAST_PEER_SOURCES names
a folder with one for each, such as `prime_rl`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
import typing_extensions
from torch import Tensor

from grpo_fast.integrations.compat import HOSTS, private


class Source(NamedTuple):
    """How a host is imported for its tests; lists are separated by spaces."""

    mocked: str = ""  # top-level modules, where they are not installed
    modules: str = ""  # of the host, besides those of `HOSTS`
    needed: str = ""  # other packages, without which the tests are skipped
    folders: str = ""  # of a checkout, to import from
    version: str = ""  # file of a checkout with the version, from the package


SOURCES = {
    "verl": Source(
        "ray tensordict omegaconf hydra codetiming orjson torchdata cloudpickle",
        "models.transformers.dense_common",
    ),
    "openrlhf": Source("deepspeed flash_attn ray bitsandbytes torchdata pylatexenc jsonlines aiohttp"),
    "nemo_rl": Source(
        "ray tensordict megatron decord zmq pynvml mlflow swanlab wandb prometheus_client hydra",
        "algorithms.loss.loss_functions",
        folders=".",
    ),
    "prime_rl": Source(
        "torchtitan loguru wandb",
        needed="jaxtyping beartype pydantic_config",
        folders="src packages/prime-rl-configs/src",
        version="../../pyproject.toml",
    ),
    "slime": Source("ray sglang sglang_router", needed="megatron", folders=".", version="../setup.py"),
    "skyrl": Source(
        "ray flash_attn hydra tensordict megatron cloudpathlib fastapi",
        "train.config",
        needed="skyrl_gym jaxtyping loguru",
        folders=". skyrl-gym",
    ),
    **dict.fromkeys(("trl", "axolotl", "swift"), Source()),
}


class _MockFinder:
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> Any:
        mock = MagicMock(name=spec.name)
        mock.__spec__, mock.__path__ = spec, []
        return mock

    def exec_module(self, module: Any) -> None:
        pass


def why_missing(host: str) -> str:
    """Return why a host cannot be imported, "" where it can; look for its checkout first."""
    source = SOURCES[host]
    checkout = Path(os.environ.get("GRPO_FAST_PEER_SOURCES", "."), host)
    paths = [str(checkout / folder) for folder in source.folders.split()]
    if paths and checkout.is_dir() and paths[0] not in sys.path:
        sys.path[:0] = paths  # also of processes started from here
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    absent = [name for name in [host, *source.needed.split()] if find_spec(name) is None]
    remedy = "install it, or set GRPO_FAST_PEER_SOURCES to a folder with a checkout"
    return f"{', '.join(absent)} cannot be imported: {remedy}" if absent else ""


@contextmanager
def importable(host: str) -> Iterator[None]:
    """Let the host import while open, without the libraries that its loss does not use.

    Not the whole of it: what patches transformers or lists its models when imported is left out, too.
    """
    source = SOURCES[host]
    mocked = source.mocked.split()
    absent = frozenset(name for name in mocked if name not in sys.modules and find_spec(name) is None)
    finder = _MockFinder(absent)
    sys.meta_path.append(finder)
    with pytest.MonkeyPatch.context() as patch:
        if host == "nemo_rl":
            sys.modules["nemo_rl.models.policy"] = MagicMock()
        if host == "skyrl":
            # pydantic refuses typing's own before Python 3.12
            patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
            patch.setattr(importlib.import_module("ray"), "is_initialized", lambda: False)
        if host == "openrlhf":
            _without_kernels(patch, "flash_attn" in absent)
        if source.version:
            found = importlib.import_module(host)
            project = Path(found.__path__[0], source.version)
            if project.is_file():  # of a checkout, which is not installed
                version = re.search(r'^\s*version ?= ?"(.+)"', project.read_text(), re.MULTILINE)
                found.__version__ = version[1]
        if host == "prime_rl":
            import prime_rl.trainer

            models = sys.modules["prime_rl.trainer.models"] = ModuleType("prime_rl.trainer.models")
            models.__path__ = [f"{path}/models" for path in prime_rl.trainer.__path__]
        try:
            yield
        finally:
            adapter = f"grpo_fast.integrations.{host}"
            if adapter in sys.modules:
                sys.modules[adapter].unpatch()
            sys.meta_path.remove(finder)
            if source.mocked:  # else it was imported whole, and others hold its classes
                forget(host, adapter, *absent)
            importlib.invalidate_caches()


def _without_kernels(patch: pytest.MonkeyPatch, without_flash: bool) -> None:
    """Run OpenRLHF's compiled entropy eagerly, and flash-attn's padding helpers in torch."""
    patch.setattr(torch, "compile", lambda function=None, **_: function or (lambda f: f))
    if not without_flash:
        return
    import flash_attn.bert_padding as padding

    def unpad_input(padded: Tensor, mask: Tensor) -> tuple[Any, ...]:
        index = mask.flatten().nonzero().squeeze(1)
        return padded.flatten(0, 1)[index], index, mask.sum(1).cumsum(0), int(mask.sum(1).max()), None

    def pad_input(rows: Tensor, index: Tensor, batch: int, length: int) -> Tensor:
        flat = rows.new_zeros(batch * length, *rows.shape[1:]).index_copy(0, index, rows)
        return flat.view(batch, length, *rows.shape[1:])

    padding.unpad_input, padding.pad_input = unpad_input, pad_input
    padding.index_first_axis = lambda rows, index: rows[index]
    padding.rearrange = lambda rows, _: rows.flatten(0, 1)
    patch.setitem(sys.modules, "flash_attn.ops", None)  # no kernel: OpenRLHF then takes its own torch path


def forget(*names: str) -> None:
    """Make the next import of these packages, and of what is in them, a first one."""
    for name in list(sys.modules):
        if name.partition(".")[0] in names or name in names:
            del sys.modules[name]


@contextmanager
def loaded(host: str) -> Iterator[SimpleNamespace]:
    """Yield the host's modules by their last names, and our `adapter`, not patched.

    The test is skipped where the host is missing, or of a version that the adapter does not know.
    """
    if reason := why_missing(host):
        pytest.skip(reason)
    with importable(host):
        try:
            modules = [private(host, path) for path in HOSTS[host].names]
        except ImportError as error:
            if "does not know" not in str(error):
                raise
            pytest.skip(str(error))
        modules += [importlib.import_module(f"{host}.{path}") for path in SOURCES[host].modules.split()]
        found = {module.__name__.rpartition(".")[2]: module for module in modules}
        before = private_names(host)
        adapter = importlib.import_module(f"grpo_fast.integrations.{host}")
        patched_by_import = private_names(host) != before
        adapter.unpatch()
        yield SimpleNamespace(**found, adapter=adapter, patched_by_import=patched_by_import)


def private_names(host: str) -> dict[str, Any]:
    """Return what the modules and classes hold that the adapter changes."""
    found: dict[str, Any] = {}
    for path, names in HOSTS[host].names.items():
        module = importlib.import_module(f"{host}.{path}")
        found[path] = dict(vars(module))
        for name in names.split():
            value = attrgetter(name)(module)
            found[f"{path}.{name}"] = dict(value) if isinstance(value, dict) else value
    return found


def assert_unchanged_by_patch(
    host: SimpleNamespace, evaluate: Callable[[], Any], *given: Any, **limits: float
) -> list[Any]:
    """Compare what `evaluate` returns on the host's own code and on ours; return the latter."""
    expected = evaluate()
    host.adapter.patch(*given)
    found = evaluate()
    torch.testing.assert_close(found, expected, **limits)
    return found


def with_gradients(outputs: Sequence[Tensor], leaves: Any) -> list[Tensor]:
    """Return outputs, and the gradients of a sum of them in which each entry has a weight of its own."""
    total = sum((torch.linspace(-1, 2, of.numel()).view_as(of) * of).sum() for of in outputs)
    return [*(of.detach() for of in outputs), *torch.autograd.grad(total, list(leaves))]
