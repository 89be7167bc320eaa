"""What the adapters' tests share: small models, examples, processes beside this one."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_fast import examples

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # for `host_stubs`, which the workers import by its name too


@pytest.fixture
def small_llama() -> Callable[..., LlamaForCausalLM]:
    def make(**options: Any) -> LlamaForCausalLM:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 53} | sizes | heads | options)).eval()

    return make


@pytest.fixture
def run_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[dict[str, Any], str]]:
    """Runs one of `grpo_fast.examples` as it stands: its names, and what it printed."""

    def run(name: str) -> tuple[dict[str, Any], str]:
        monkeypatch.chdir(tmp_path)
        return runpy.run_path(f"{examples.__path__[0]}/{name}.py"), capsys.readouterr().out

    return run


@pytest.fixture
def run_worker(tmp_path: Path) -> Callable[..., None]:
    """Runs a worker of this folder, which is given a file for its store, to its end."""

    def run(name: str, *arguments: Any, launcher: tuple[str, ...] = ()) -> None:
        paths = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, *launcher, str(HERE / name), str(tmp_path / "store"), *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    return run


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, for TRL's trainers."""
    from benchmarks.models import save_model

    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    return folder


@pytest.fixture(autouse=True)
def trl_does_not_stay_patched() -> Iterator[None]:
    yield
    if adapter := sys.modules.get("grpo_fast.integrations.trl.patch"):
        adapter.unpatch()
