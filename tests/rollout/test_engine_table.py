"""The table of engines, and a custom engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from grpo_fast.cli import main
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.rollout import Sampling, make_engine, require_engine
from grpo_fast.rollout.engines import ENGINES, engine_kind

ELSEWHERE = '''
from grpo_fast.rollout import Completion, EngineKind


class Echo:
    """Answers with the end of the prompt."""

    name = "echo"

    def generate(self, prompts, n, sampling, *, observer=None):
        def answer(prompt):
            ids = tuple(prompt[-sampling.max_completion_length:])
            return Completion(ids, (0.0,) * len(ids), "", True)

        return [[answer(prompt) for _ in range(n)] for prompt in prompts]


class EchoKind(EngineKind):
    name = "echo"

    def needs(self, config):
        if config.top_k:
            raise ValueError(f"rollout.top_k = {config.top_k}: echo draws nothing; leave it out")

    def make(self, config, policy, *, max_length, world):
        return Echo()
'''


@pytest.fixture
def elsewhere(tmp_path: Path) -> str:
    """Write a custom engine into a file, and return its path for `rollout.engine`."""
    (tmp_path / "echo.py").write_text(ELSEWHERE)
    return f"{tmp_path / 'echo.py'}:EchoKind"


def test_an_engine_from_elsewhere_generates_and_is_planned_for(
    elsewhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RolloutConfig(engine=elsewhere)
    policy: Any = SimpleNamespace(device=torch.device("cpu"))

    engine = make_engine(config, policy)

    groups = engine.generate([[1, 2, 3]], 2, Sampling(max_completion_length=2))
    assert [completion.token_ids for completion in groups[0]] == [(2, 3), (2, 3)]
    with pytest.raises(ValueError, match=r"top_k = 3: echo"):
        require_engine(RolloutConfig(engine=elsewhere, top_k=3))
    sizes = ["--prompt-length", "64", "--max-completion-length", "64"]
    run = ["plan", "--model", "SmolLM2-135M", "--gpu", "H200", *sizes, f"rollout.engine={elsewhere}"]
    assert main(run) == 0
    printed = capsys.readouterr().out
    assert "rollout engine: echo" in printed and "KV cache" in printed


@pytest.mark.parametrize("name", ENGINES)
def test_each_row_has_its_name(name: str) -> None:
    assert engine_kind(name).name == name


def test_a_name_that_is_in_no_table_and_a_class_that_is_no_row_are_refused() -> None:
    with pytest.raises(ValidationError, match="engine"):
        RolloutConfig(engine="sglang")
    with pytest.raises(ValueError, match="'sglang' is not known: give auto, transformers, vllm"):
        engine_kind("sglang")
    with pytest.raises(ValueError, match="no EngineKind"):
        engine_kind("grpo_fast.rollout.transformers:TransformersEngine")
