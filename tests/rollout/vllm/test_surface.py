"""What this package takes from vLLM is in vLLM's sources, which need not be importable.

`VLLM_SOURCES` names a folder that holds a package `vllm` of another version than the installed one.
"""

from __future__ import annotations

import ast
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import grpo_fast

OURS = Path(grpo_fast.__file__).parent / "rollout" / "vllm"
_INSTALLED = find_spec("vllm")
SOURCES = Path(
    os.environ.get("VLLM_SOURCES") or (Path(_INSTALLED.origin or "").parents[1] if _INSTALLED else "")
)
pytestmark = pytest.mark.skipif(not (SOURCES / "vllm").is_dir(), reason="needs vLLM, or VLLM_SOURCES")

MEMBERS = {
    "vllm.device_allocator.cumem:CuMemAllocator": ("allocator_and_pools", "instance", "pointer_to_data"),
    "vllm.engine.arg_utils:EngineArgs": ("enable_return_routed_experts", "distributed_executor_backend"),
    "vllm.v1.engine.llm_engine:LLMEngine": (
        *("add_lora", "add_request", "collective_rpc", "engine_core", "get_tokenizer"),
        *("is_sleeping", "model_config", "model_executor", "output_processor", "remove_lora"),
        *("reset_prefix_cache", "sleep", "step", "wake_up"),
    ),
    "vllm.v1.engine.output_processor:OutputProcessor": ("request_states",),
    "vllm.v1.worker.gpu_worker:Worker": (
        *("_maybe_get_memory_pool_context", "determine_available_memory", "get_model", "reload_weights"),
    ),
    "vllm.lora.request:LoRARequest": ("lora_int_id",),
}
"""By class: its methods and attributes that this package uses or replaces."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def source_of(module: str) -> Path | None:
    """The file of a module of vLLM, None where there is none."""
    place = SOURCES.joinpath(*module.split("."))
    files = place.with_suffix(".py"), place / "__init__.py"
    return next((file for file in files if file.is_file()), None)


def names_in(tree: ast.AST) -> set[str]:
    """What a module, a class or its methods define, import or set, at any depth."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def names_of(module: str) -> set[str]:
    """What can be imported from a module, through stars too."""
    path = source_of(module)
    assert path is not None, f"vLLM has no module {module}"
    found = names_in(parsed(path))
    stars = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
    return found.union(
        *(names_of(f"{module}.{star.module}" if star.level else str(star.module)) for star in stars)
    )


def imports() -> list[tuple[str, str]]:
    """Module and name of everything that this package imports from vLLM."""
    nodes = [node for file in sorted(OURS.glob("*.py")) for node in ast.walk(parsed(file))]
    lines = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    of_vllm = [line for line in lines if (line.module or "").split(".")[0] == "vllm"]
    return sorted({(line.module or "", alias.name) for line in of_vllm for alias in line.names})


def arguments(function: str, file: str) -> set[str]:
    """The keys that a function of ours puts into `arguments`, or returns as a dictionary."""
    tree = next(n for n in ast.walk(parsed(OURS / file)) if getattr(n, "name", None) == function)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.Return)) and isinstance(node.value, ast.Dict):
            found |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "arguments"
        ):
            found.add(ast.literal_eval(node.slice))
    return found


def members(module: str, kind: str) -> set[str]:
    """What a class of vLLM has, with its bases of vLLM."""
    path = source_of(module)
    assert path is not None, f"vLLM has no module {module}"
    tree = parsed(path)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert kind in classes, f"{module} has no class {kind}"
    found = names_in(classes[kind])
    for base in classes[kind].bases:
        if not isinstance(base, ast.Name):
            continue
        if base.id in classes:
            found |= members(module, base.id)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm"):
                continue
            if base.id in {alias.name for alias in node.names}:
                found |= members(node.module or "", base.id)
    return found


@pytest.mark.parametrize(("module", "name"), imports(), ids=lambda part: part)
def test_every_import_is_of_a_name_that_its_module_has(module, name):
    assert name in names_of(module) or source_of(f"{module}.{name}")


@pytest.mark.parametrize("place", MEMBERS)
def test_every_member_that_is_used_is_one_of_its_class(place):
    assert [name for name in MEMBERS[place] if name not in members(*place.split(":"))] == []


def test_every_argument_of_the_engine_is_one_of_vllms():
    given = arguments("engine_arguments", "settings.py") | arguments("memory_arguments", "settings.py")
    given |= arguments("start", "start.py")

    assert len(given) > 15
    assert given - members("vllm.engine.arg_utils", "EngineArgs") == set()
