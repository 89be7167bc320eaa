"""Imports go one way, and `grpo_fast.kernels` does not shadow the hub's package `kernels`.

transformers looks for `kernels` by name. An installed package holds what the sources do, and its head needs
torch alone.
"""

from __future__ import annotations

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

import grpo_fast

ROOT = Path(__file__).resolve().parent.parent
HUB_KERNELS = "kernels==0.17.2"
BESIDE_THE_HUBS = """
import transformers
import grpo_fast.kernels
import kernels

config = transformers.LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
)
assert transformers.LlamaForCausalLM(config).lm_head.weight.shape == (16, 8)
print(kernels.__file__, grpo_fast.kernels.__file__)
"""
FROM_THE_HUB = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel

grpo_fast = get_local_kernel(Path(sys.argv[1]))
hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(50, 16)
targets = torch.randint(50, (8,))
found = grpo_fast.linear_logprob(hidden, weight, targets).logprob
torch.testing.assert_close(found, (hidden @ weight.T).log_softmax(-1)[torch.arange(8), targets])
(gradient,) = torch.autograd.grad(found.sum(), hidden)
assert "grpo_fast" not in sys.modules
import grpo_fast as installed  # beside it

again = installed.linear_logprob(hidden, weight, targets).logprob
assert torch.equal(again, found) and torch.equal(torch.autograd.grad(again.sum(), hidden)[0], gradient)
"""
INSTALLED = """
import grpo_fast.kernels
from grpo_fast.cli import main

print(grpo_fast.kernels.__file__)
main(["bench", "--help"])
"""


HEAD_ALONE = """
import sys
import torch

before = {name.partition(".")[0] for name in sys.modules}
from grpo_fast import GRPOLossConfig, linear_cross_entropy, linear_grpo_loss, linear_logprob

added = {name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names
assert added == {"grpo_fast"} and "torch._dynamo" not in sys.modules, added  # as quick as torch's own import
hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(50, 16)
targets, ids = torch.randint(50, (8,)), torch.arange(8) // 4
found = linear_logprob(hidden, weight, targets).logprob
torch.testing.assert_close(found, (hidden @ weight.T).log_softmax(-1)[torch.arange(8), targets])
config = GRPOLossConfig("dapo")
loss = linear_grpo_loss(hidden, weight, targets, torch.randn(8), sequence_ids=ids, config=config).loss
(loss + found.sum() + linear_cross_entropy(hidden, weight, targets)).backward()
assert hidden.grad.abs().sum() > 0
import grpo_fast.integrations.host, grpo_fast.integrations.liger, grpo_fast.integrations.losses

for name in ("train", "GRPOTrainer", "Callback"):
    try:
        getattr(grpo_fast, name)
    except ImportError as error:
        print(error)
"""


def run(*command: str | Path, cwd: Path, path: str | Path | None = None, code: int = 0) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHONPATH", "COV"))}
    environment["GRPO_FAST_CUDA"] = "0"  # nothing here needs what nvcc builds
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that building leaves nothing in the real ones."""
    copy = tmp_path_factory.mktemp("layout") / "checkout"
    copy.mkdir()
    for name in ("grpo_fast", "kernels", "csrc", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def install(checkout: Path, folder: Path, *options: str, libraries: Sequence[str] = ()) -> tuple[Path, Path]:
    """The (python, packages) of an environment with the copy installed.

    Args:
        libraries: what is there besides, with all that they require; none: what is installed here.
    """
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    waiting, linked = [*libraries], set[str]()
    while waiting:
        if (name := waiting.pop()) not in linked and (found := _installed(name)):
            linked.add(name)
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (packages / top).is_symlink():  # several distributions share nvidia/
                    (packages / top).symlink_to(str(found.locate_file(top)))
            waiting += [
                re.split(r"[^\w.-]", line)[0] for line in found.requires or () if "extra ==" not in line
            ]
    if not libraries:
        ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (packages / "dependencies.pth").write_text("\n".join(ours))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation"]
    run(*pip, *options, checkout, cwd=folder)
    return python, packages


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:  # of another platform
        return None


def test_the_head_needs_torch_alone_and_the_trainer_says_how_to_get_it(checkout: Path, tmp_path: Path):
    python, _ = install(checkout, tmp_path, libraries=("torch", "numpy", "setuptools"))

    remedy = "pip install 'grpo-fast[train]'"
    assert run(python, "-c", HEAD_ALONE, cwd=tmp_path).count(remedy) == 3
    for command in (["train", "quickstart"], ["config"], ["doctor"], ["convert", "any.yaml"]):
        shown = run(python, "-m", "grpo_fast", *command, cwd=tmp_path, code=1)
        assert len(shown.splitlines()) == 1 and command[0] in shown and remedy in shown


def test_a_trainer_without_vllm_says_how_to_get_it_before_it_loads_weights(checkout: Path, tmp_path: Path):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.findall(r'"([\w-]+)', re.search(r"^train = \[(.*?)^\]", project, re.M | re.S)[1])
    python, packages = install(checkout, tmp_path, libraries=("torch", "numpy", "setuptools", *needed))
    assert not any(packages.glob("vllm*"))
    code = "from transformers import LlamaConfig; LlamaConfig(num_hidden_layers=1).save_pretrained('m')"
    run(python, "-c", code, cwd=tmp_path)  # without weights
    config = tmp_path / "config.yaml"
    config.write_text("{model: {path: m}, dataset: {source: rows.jsonl}, rewards: [{reward: exact_match}]}")

    shown = run(python, "-m", "grpo_fast", "train", config, "rollout.engine=vllm", cwd=tmp_path, code=1)

    assert "Traceback" not in shown
    assert "rollout.engine = 'vllm': vLLM is not installed: pip install" in shown.splitlines()[-1]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the hub's package `kernels`."""
    folder = tmp_path_factory.mktemp("hub")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        HUB_KERNELS,
    ]
    if subprocess.run(pip, capture_output=True).returncode:
        pytest.skip(f"{HUB_KERNELS} cannot be installed here (is the package registry reachable?)")
    return folder


def test_a_checkout_loads_kernels_and_transformers_beside_the_hubs(checkout: Path, hub: Path, tmp_path: Path):
    python, _ = install(checkout, tmp_path, "--editable")
    # From the checkout's root, which `python -c` puts before everything else, as pytest does.
    hubs, ours = run(python, "-c", BESIDE_THE_HUBS, cwd=checkout, path=hub).split()
    assert hubs.startswith(str(hub)) and ours.startswith(str(checkout))


def test_the_hubs_package_loads_the_head_beside_an_installed_one(hub: Path, tmp_path: Path):
    run(sys.executable, ROOT / ".ci" / "hub", tmp_path / "built", cwd=tmp_path)
    packages = os.pathsep.join(map(str, (hub, ROOT)))
    run(sys.executable, "-c", FROM_THE_HUB, tmp_path / "built", cwd=tmp_path, path=packages)


def test_an_installed_package_holds_every_file_and_the_benchmarks(checkout: Path, tmp_path: Path):
    data = {
        str(path.relative_to(checkout))
        for path in (checkout / "grpo_fast").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    python, packages = install(checkout, tmp_path)
    assert [name for name in sorted(data) if not (packages / name).is_file()] == []

    shown = run(python, "-c", INSTALLED, cwd=tmp_path)
    assert str(packages) in shown and "usage: grpo-fast bench" in shown
    assert list((packages / "grpo_fast" / "benchmarks").rglob("*.json")), "recorded lengths are installed"


def test_type_checkers_see_the_public_names():
    source = ast.parse((ROOT / "grpo_fast" / "__init__.py").read_text(encoding="utf-8"))

    block = next(node for node in source.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = [alias.asname for node in imports for alias in node.names]

    assert ast.unparse(block.test) == "TYPE_CHECKING"
    assert sorted(seen) == sorted(grpo_fast.__all__)


def test_no_room_imports_one_above_it():
    # In a process of its own: it silences the loggers that are there.
    check = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    found = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_no_files_import_each_other_in_a_circle():
    """Imports within functions count, and so do the names that a package finds when they are first used."""
    roots = ("grpo_fast", "benchmarks")
    at_run_time, all_of_them = (
        grimp.build_graph(*roots, exclude_type_checking_imports=excluded, cache_dir=None)
        for excluded in (True, False)
    )
    imports = {
        module: (
            all_of_them if at_run_time.find_children(module) else at_run_time
        ).find_modules_directly_imported_by(module)
        for module in at_run_time.modules
    }

    assert {"grpo_fast.kernels.select", "grpo_fast.loop.trainer", "benchmarks.test_kernels"} <= imports.keys()
    graphlib.TopologicalSorter(imports).prepare()  # a CycleError names the files


@pytest.mark.parametrize("name", ["torch", "transformers", "triton", "liger-kernel", "trl", "vllm"])
def test_a_library_used_by_private_names_has_a_ceiling_above_the_lock(name):
    asked = re.search(rf'"({name}[>=][^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    bounds = Requirement(asked[1].partition(";")[0]).specifier
    locked = "".join(path.read_text(encoding="utf-8") for path in (ROOT / ".ci/requirements").glob("*.txt"))

    assert {bound.operator for bound in bounds} == {">=", "<"}
    assert bounds.contains(re.search(rf"^{name}(?:-cpu)?==(\S+)$", locked, re.M)[1])
