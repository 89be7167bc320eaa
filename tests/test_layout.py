"""The folder `kernels/` must serve `grpo_fast.kernels` without shadowing the hub's `kernels` package,
which transformers looks for by name."""

from __future__ import annotations

import ast
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import grpo_fast

ROOT = Path(__file__).resolve().parent.parent
HUB_KERNELS = "kernels==0.17.2"
PROBE = """
import importlib.resources

import grpo_fast.kernels
import transformers
from grpo_fast.config_io import load_config

def test_a_transformers_model_loads():
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    assert transformers.LlamaForCausalLM(config).lm_head.weight.shape == (16, 8)

def test_the_recipes_are_installed():
    assert load_config("quickstart", []).model.path

def test_type_checkers_may_read_the_annotations():
    assert importlib.resources.files("grpo_fast").joinpath("py.typed").is_file()

if __name__ == "__main__":
    test_a_transformers_model_loads()
    test_the_recipes_are_installed()
    test_type_checkers_may_read_the_annotations()
    print(grpo_fast.kernels.__file__)
"""
BENCHMARKS = """
from grpo_fast.benchmarks.models import load_lengths
from grpo_fast.cli import main

assert load_lengths().prompts
main(["bench", "--help"])
"""


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHONPATH", "COV"))}
    environment["GRPO_FAST_CUDA"] = "0"  # nothing here needs what nvcc builds
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that building leaves nothing in the real ones."""
    copy = tmp_path_factory.mktemp("layout") / "checkout"
    copy.mkdir()
    for name in ("grpo_fast", "kernels", "csrc", "benchmarks"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "tests").mkdir()
    (copy / "tests" / "test_probe.py").write_text(PROBE)
    return copy


@pytest.fixture(scope="module")
def hub_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hub_kernels")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, HUB_KERNELS]
    if subprocess.run([str(word) for word in pip], capture_output=True).returncode:
        pytest.skip(f"{HUB_KERNELS} cannot be installed here (is the package registry reachable?)")
    return target


def install(checkout: Path, mode: str, folder: Path) -> tuple[Path, Path]:
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    # The dependencies of this environment, without the grpo_fast that is installed in it.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    source = ["--editable", checkout] if mode == "editable" else [checkout]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation"]
    run(*pip, *source, cwd=folder)
    return python, packages


@pytest.mark.parametrize("mode", ["regular", "editable"])
def test_an_installed_package_loads_kernels_and_transformers_beside_the_hubs(
    mode: str, checkout: Path, hub_kernels: Path, tmp_path: Path
):
    python, packages = install(checkout, mode, tmp_path)

    elsewhere = run(python, "-c", PROBE + BENCHMARKS, cwd=tmp_path, path=hub_kernels)
    assert str(packages if mode == "regular" else checkout) in elsewhere
    assert "usage: grpo-fast bench" in elsewhere


def test_pytest_from_the_root_of_a_checkout_loads_kernels_and_transformers(checkout: Path, hub_kernels: Path):
    pytest_command = Path(sys.executable).parent / "pytest"
    assert "3 passed" in run(pytest_command, "tests/test_probe.py", cwd=checkout, path=hub_kernels)


def test_type_checkers_see_the_public_names():
    source = ast.parse((ROOT / "grpo_fast" / "__init__.py").read_text(encoding="utf-8"))

    block = next(node for node in source.body if isinstance(node, ast.If))
    seen = [alias.asname for node in block.body for alias in node.names]

    assert ast.unparse(block.test) == "TYPE_CHECKING"
    assert sorted(seen) == sorted(grpo_fast.__all__)
