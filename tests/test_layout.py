"""The folder `kernels/` must serve `grpo_fast.kernels` without shadowing the hub's `kernels` package,
which transformers looks for by name."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HUB_KERNELS = "kernels==0.17.2"
PROBE = """
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

if __name__ == "__main__":
    test_a_transformers_model_loads()
    test_the_recipes_are_installed()
    print(grpo_fast.kernels.__file__)
"""
BENCHMARKS = """
from grpo_fast.benchmarks.workload import load_lengths
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


@pytest.fixture(scope="module", params=[False, True], ids=["without hub kernels", "with hub kernels"])
def hub_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    if not request.param:
        return None
    target = tmp_path_factory.mktemp("hub_kernels")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        HUB_KERNELS,
    ]
    if subprocess.run(pip, capture_output=True).returncode:
        pytest.skip(f"{HUB_KERNELS} cannot be installed here (is the package registry reachable?)")
    return target


@pytest.mark.parametrize("mode", ["regular", "editable"])
def test_an_installed_package_loads_kernels_and_transformers(
    mode: str, checkout: Path, hub_kernels: Path | None, tmp_path: Path
):
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    packages = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    # The dependencies of this environment, without the grpo_fast that is installed in it.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    source = ["--editable", checkout] if mode == "editable" else [checkout]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation"]
    run(*pip, *source, cwd=tmp_path)

    for cwd in (tmp_path, checkout):
        location = run(python, "-c", PROBE, cwd=cwd, path=hub_kernels)
        expected = packages if (mode, cwd) == ("regular", tmp_path) else checkout
        assert str(expected) in location
    assert "usage: grpo-fast bench" in run(python, "-c", BENCHMARKS, cwd=tmp_path, path=hub_kernels)


@pytest.mark.parametrize(
    "command", [["pytest"], ["python", "-m", "pytest"]], ids=["pytest", "python -m pytest"]
)
def test_pytest_from_the_root_of_a_checkout_loads_kernels_and_transformers(
    command: list[str], checkout: Path, hub_kernels: Path | None
):
    executable = Path(sys.executable).parent / command[0]
    printed = run(executable, *command[1:], "tests/test_probe.py", cwd=checkout, path=hub_kernels)
    assert "2 passed" in printed
