from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.cli import main
from grpo_fast.config.load import dump_config
from grpo_fast.config.policy import OptimizerConfig
from grpo_fast.config.schema import TrainConfig, at
from grpo_fast.config.stages import resolve_stages
from grpo_fast.plan import auto, longest_prompt
from grpo_fast.plan.auto import CONSTANTS, OF_ALL_STAGES, resolve_auto
from grpo_fast.plan.devices import GIB, device_budget
from grpo_fast.plan.model_shape import ModelShape, model_config, model_shape
from grpo_fast.plan.search import LEVEL, SYNC, Search
from grpo_fast.policy import load
from grpo_fast.rollout import vllm

GPU = replace(device_budget("H200"), name="a small GPU")
TOOL = "grpo_fast.examples.code_tool:run_python"
LENGTHS = {"max_completion_length": 8}


def auto_run(toy: dict[str, Any], **changes: Any) -> TrainConfig:
    """The toy run with all left to the plan and prompts of known length."""
    dataset = toy["dataset"] | {"max_prompt_length": 8}
    config = {key: value for key, value in toy.items() if key not in ("micro_batch_tokens", "rollout")}
    return TrainConfig.model_validate(config | {"dataset": dataset, "rollout": LENGTHS} | changes)


@pytest.fixture(scope="module")
def shape(toy: dict[str, Any]) -> ModelShape:
    return model_shape(model_config(toy["model"]["path"]), auto_run(toy).model)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, toy: dict[str, Any], shape: ModelShape) -> Any:
    """`memory(10**6)`: there are vLLM and a GPU with so much more than the toy's smallest step takes."""
    monkeypatch.setattr(auto, "shape_of", lambda *_: shape)
    monkeypatch.setattr(auto, "measured_shape", lambda *_: replace(shape, measured=1.0))
    monkeypatch.setattr(auto, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(vllm, "installed_version", lambda: "0.33.0")

    def give(more: int) -> None:
        search = Search(auto_run(toy), shape, GPU)
        total = GPU.total - search.least().free + more
        monkeypatch.setattr(auto, "device_budget", lambda: replace(GPU, total=total))

    return give


def test_a_cpu_takes_constants_and_what_is_set_by_hand_stays(toy: dict[str, Any]) -> None:
    own = {key: toy[key] for key in ("dataset", "rewards")} | {"model": {"path": "-", "device": "cpu"}}

    found = resolve_auto(TrainConfig.model_validate(own))
    preference = resolve_auto(TrainConfig.model_validate(own | {"algorithm": "dpo", "rewards": []}))

    assert [at(found, key) for key in CONSTANTS] == [*CONSTANTS.values()]
    assert preference.micro_batch_tokens == 16_384
    assert preference.model.gradient_checkpointing is False
    mlp = own["model"] | {"gradient_checkpointing": "mlp", "dtype": "float32"}
    set_by_hand = TrainConfig.model_validate(toy | {"model": mlp})
    assert resolve_auto(set_by_hand) == set_by_hand


def test_a_gpu_takes_the_planners_choice_and_what_is_set_stays(
    toy: dict[str, Any], memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory(10**9)

    found = resolve_auto(auto_run(toy))

    assert [at(found, key) for key in OF_ALL_STAGES] == [65_536, False, [], "auto", 0, 32, 0.01]
    assert "chosen for a small GPU" in caplog.text and "micro_batch_tokens=65536" in caplog.text
    assert resolve_auto(found) == found
    share = {"vllm": {"gpu_memory_utilization": 0.4, "max_sequences": 7}}
    own = auto_run(toy, rollout=LENGTHS | share, micro_batch_tokens=100, memory={"offload": "none"})
    resolved = resolve_auto(own)
    kept = resolved.rollout.vllm
    assert resolved.micro_batch_tokens == 100
    assert (resolved.memory.offload, kept.max_sequences, kept.kv_cache_gib) == ("none", 7, None)


def test_the_engine_that_is_installed_is_the_one_planned_for(
    toy: dict[str, Any], memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(3 * 10**5)
    monkeypatch.setattr(vllm, "installed_version", lambda: None)

    found = resolve_auto(auto_run(toy))

    assert (found.rollout.engine, found.rollout.vllm.max_sequences) == ("auto", None)


def test_keys_and_values_hold_the_longest_question_of_evaluation(toy: dict[str, Any], memory: Any) -> None:
    memory(2 * GIB)
    longest = toy["evaluation"]["dataset"] | {"max_prompt_length": 2**21}

    kv_cache = [
        resolve_auto(auto_run(toy, evaluation=evaluation)).rollout.vllm.kv_cache_gib
        for evaluation in ({}, {"dataset": longest})
    ]

    per_token = 2 * 2 * 2 * 8 * 4  # layers, key and value, heads, width, bytes
    assert kv_cache == [0.01, pytest.approx(2**21 * per_token / GIB, abs=0.011)]


def test_prompts_without_a_limit_are_measured_with_their_tools(toy: dict[str, Any], memory: Any) -> None:
    memory(10**6)
    unlimited = auto_run(toy, dataset=toy["dataset"])
    limited = auto_run(toy, dataset=toy["dataset"] | {"max_prompt_length": 3})
    template = "{% for tool in tools or [] %}w2 w3 {% endfor %}{{ messages[0].content }}"
    stages = [{"name": "with tools", "overrides": {"rollout": {"tools": [TOOL]}}}]
    shown = {"model": toy["model"] | {"chat_template": template}, "stages": stages}

    found = resolve_auto(unlimited)

    assert longest_prompt(unlimited.dataset, unlimited.model, unlimited.rollout) == 3
    same = {key: getattr(unlimited, key) for key in ("dataset", "evaluation")}
    assert found == resolve_auto(limited).model_copy(update=same)
    (with_tools,) = resolve_stages(auto_run(toy, dataset=toy["dataset"], **shown))
    assert longest_prompt(*(getattr(with_tools.config, key) for key in ("dataset", "model", "rollout"))) == 5


def test_what_does_not_fit_is_refused_with_the_missing_bytes(toy: dict[str, Any], memory: Any) -> None:
    memory(-1000)

    with pytest.raises(ValueError, match=r"a small GPU: 4 prompts.* KiB more.*model\.dtype=bfloat16, "):
        resolve_auto(auto_run(toy))


def test_a_model_that_cannot_be_planned_trains_with_constants(
    toy: dict[str, Any], memory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory(10**9)

    def unknown(*_: object) -> None:
        raise RuntimeError("this model allocates what grows otherwise")

    monkeypatch.setattr(auto, "shape_of", unknown)
    found = resolve_auto(auto_run(toy))

    assert (found.rollout.num_generations, found.micro_batch_tokens) == (8, 16_384)
    assert (found.memory.offload, found.rollout.vllm.sleep_level) == ("auto", "auto")
    assert "the planner cannot count the model" in caplog.text and "grows otherwise" in caplog.text


def test_one_choice_fits_every_stage(toy: dict[str, Any], memory: Any) -> None:
    memory(30 * 10**6)
    longer = {"rollout": {"max_completion_length": 64, "num_generations": 60}, "prompts_per_step": 40}
    stages = [{"name": "as the run", "steps": 2}, {"name": "longer", "overrides": longer}]

    alone, both = (resolve_auto(auto_run(toy, stages=some)) for some in ([], stages))

    assert both.rollout.vllm.max_sequences <= alone.rollout.vllm.max_sequences
    assert both.micro_batch_tokens < alone.micro_batch_tokens
    settings = [[True, "mlp"], [["gradients"], []], ["merged", "adapter"], [0, 2]]
    keys = ("model.gradient_checkpointing", "memory.offload", SYNC, LEVEL)
    combined = [OF_ALL_STAGES[key](each) for key, each in zip(keys, settings, strict=True)]
    assert combined == [True, ["gradients"], "adapter", 2]


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_a_resumed_run_keeps_the_dtype_that_was_left_to_its_cpu(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    model = {"path": toy["model"]["path"], "device": "cpu"}
    sections: dict[str, Any] = {"dataset": toy["dataset"], "model": model, "algorithm": algorithm}
    config = TrainConfig.model_validate(
        sections | ({"rewards": toy["rewards"]} if algorithm == "grpo" else {})
    )
    monkeypatch.setattr(load, "faster_dtype", lambda: "float32")
    (tmp_path / "config.yaml").write_text(dump_config(resolve_auto(config, tmp_path)))
    monkeypatch.setattr(load, "faster_dtype", lambda: "bfloat16")

    again, anew = resolve_auto(config, tmp_path), resolve_auto(config)

    assert (again.model.dtype, anew.model.dtype) == ("float32", "bfloat16")
    rounded = config.model_copy(update={"optimizer": OptimizerConfig(stochastic_rounding=True)})
    monkeypatch.setattr(load, "faster_dtype", lambda: "float32")
    assert resolve_auto(rounded).model.dtype == "bfloat16"  # which alone is rounded by chance


@pytest.mark.parametrize("command", ["preview", "eval"])
def test_what_only_generates_resolves_auto_and_takes_threads(
    toy: dict[str, Any], tmp_path: Path, command: str
) -> None:
    before = torch.get_num_threads()
    (tmp_path / "run.yaml").write_text(dump_config(auto_run(toy)))
    try:
        assert main([command, str(tmp_path / "run.yaml"), f"threads={before + 1}"]) == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_ranks_on_a_cpu_replicate_and_each_needs_a_prompt(toy: dict[str, Any]) -> None:
    mine = TrainConfig.model_validate(toy | {"prompts_per_step": 2})

    assert resolve_auto(mine, ranks=2).distributed.mode == "replicate"
    assert resolve_auto(mine).distributed == mine.distributed
    with pytest.raises(ValueError, match="3 ranks"):
        resolve_auto(mine, ranks=3)
