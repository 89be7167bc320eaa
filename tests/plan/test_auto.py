from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_fast.cli import main
from grpo_fast.config import TrainConfig
from grpo_fast.config_io import dump_config, load_config
from grpo_fast.plan import auto
from grpo_fast.plan.auto import AUTO_MOST, planned_kv_cache_bytes, resolve_auto
from grpo_fast.plan.devices import DeviceBudget, device_budget
from grpo_fast.plan.model_shape import model_config
from grpo_fast.plan.search import plan
from grpo_fast.run import train

CPU = DeviceBudget("cpu", "cpu", 1 << 30)


def auto_run(toy: dict[str, Any], **changes: Any) -> TrainConfig:
    """The toy run with `num_generations: auto` and prompts of known length."""
    dataset = toy["dataset"] | {"max_prompt_length": 8}
    rollout = {"num_generations": "auto", "max_completion_length": 8}
    return TrainConfig.model_validate(toy | {"dataset": dataset, "rollout": rollout} | changes)


def needed(toy: dict[str, Any], generations: int, length: int = 8) -> int:
    """Bytes that the toy's step takes with so many completions."""
    rollout = {"num_generations": generations, "max_completion_length": length}
    config = auto_run(toy, rollout=rollout)
    return CPU.total - plan(config, model_config(config.model.path), CPU, knobs=False).prediction.free


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`memory(bytes)`: what the device has."""

    def give(total: int) -> None:
        monkeypatch.setattr(auto, "device_budget", lambda _: replace(CPU, total=total))

    return give


def test_auto_takes_what_fits_up_to_what_is_usual(
    toy: dict[str, Any], memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory(1 << 30)

    with caplog.at_level(logging.WARNING):
        found = resolve_auto(auto_run(toy))

    assert found.rollout.num_generations == AUTO_MOST
    assert "rollout.num_generations = auto: 64" in caplog.text


def test_with_less_memory_auto_takes_less(toy: dict[str, Any], memory: Any) -> None:
    sizes = []
    for generations in (40, 20, 2):
        memory(needed(toy, generations))
        sizes.append(resolve_auto(auto_run(toy)).rollout.num_generations)

    # The largest of those that take as much: how even the micro-batches are plays a part.
    assert AUTO_MOST > sizes[0] >= 40 > sizes[1] >= 20 > sizes[2] >= 2


@pytest.mark.parametrize(
    ("total", "changes", "message"),
    [
        (1 << 16, {}, r"need .* cpu has 64\.0 KiB"),
        (1 << 30, {"max_prompt_length": None}, "max_prompt_length"),
    ],
    ids=["not even two fit", "prompts of unknown length"],
)
def test_auto_says_why_it_finds_no_number(
    total: int, changes: dict[str, Any], message: str, toy: dict[str, Any], memory: Any
) -> None:
    memory(total)
    dataset = toy["dataset"] | {"max_prompt_length": 8} | changes

    with pytest.raises(ValueError, match=rf"num_generations.*{message}"):
        resolve_auto(auto_run(toy, dataset=dataset))


def test_a_number_stays_as_it_is(toy: dict[str, Any]) -> None:
    config = TrainConfig.model_validate(toy)

    assert resolve_auto(config) is config


def test_a_stage_can_leave_its_own_group_to_auto(toy: dict[str, Any], memory: Any) -> None:
    memory(needed(toy, 30))
    longer = {"rollout": {"max_completion_length": 16}}
    own = {"rollout": {"max_completion_length": 16, "num_generations": "auto"}}
    stages = [{"name": "short", "steps": 2}, {"name": "long", "overrides": longer}]

    inherited = resolve_auto(auto_run(toy, stages=stages)).rollout.num_generations
    stages[1]["overrides"] = own
    chosen = resolve_auto(auto_run(toy, stages=stages))

    alone = resolve_auto(auto_run(toy)).rollout.num_generations
    assert chosen.rollout.num_generations == alone
    assert chosen.stages[1].overrides["rollout"]["num_generations"] == inherited < alone


def test_a_resumed_run_keeps_its_group_whatever_memory_there_is(
    toy: dict[str, Any], memory: Any, tmp_path: Path
) -> None:
    memory(needed(toy, 5))
    config = auto_run(toy, output_dir=str(tmp_path / "run"), max_steps=2)
    train(config, display=False)
    started = load_config(tmp_path / "run" / "config.yaml").rollout.num_generations

    memory(1 << 30)
    train(config.model_copy(update={"max_steps": 3}), resume="latest", display=False)

    resumed = load_config(tmp_path / "run" / "config.yaml")
    assert (resumed.rollout.num_generations, resumed.max_steps) == (started, 3) == (5, 3)


@pytest.mark.parametrize("command", [["generate"], ["groups", "describe"]], ids=str)
def test_a_look_before_training_resolves_auto_too(
    command: list[str], toy: dict[str, Any], memory: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory(needed(toy, 5))
    (tmp_path / "run.yaml").write_text(dump_config(auto_run(toy)))

    code = main([*command, str(tmp_path / "run.yaml")])

    assert code == 0
    assert "num_generations = auto: 5" in caplog.text


def test_vllm_on_a_gpu_gets_what_a_step_needs(
    toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = auto_run(toy, rollout={"max_completion_length": 8, "num_generations": 4, "engine": "vllm"})
    gpu = device_budget("H200")

    def planned(total: int) -> int | None:
        monkeypatch.setattr(auto, "_device_at_hand", lambda _: replace(gpu, total=total))
        return planned_kv_cache_bytes(config)

    enough = planned(gpu.total)
    pages = 4 * 4 + 1  # a prompt of 8 tokens and 8 more fill a page of 16
    assert enough == pages * 16 * (2 * 2 * 2 * 8 * 4)  # layers, key and value, heads, width, bytes
    assert not caplog.text
    with pytest.raises(ValueError, match="one completion needs"):
        planned(1 << 20)


def test_a_size_of_the_users_is_left_to_the_engine(toy: dict[str, Any]) -> None:
    rollout = {"engine": "vllm", "vllm": {"kv_cache_gib": 2}}

    assert planned_kv_cache_bytes(auto_run(toy, rollout=rollout)) is None
