from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_fast.cli import main
from grpo_fast.config import TrainConfig
from grpo_fast.config_io import dump_config, load_config
from grpo_fast.plan import auto
from grpo_fast.plan.auto import AUTO_MOST, planned_kv_cache_bytes, resolve_auto
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.model_shape import model_config
from grpo_fast.plan.search import plan
from grpo_fast.plan.trace import Traces
from grpo_fast.run import train

GPU = replace(device_budget("H200"), name="gpu")


def auto_run(toy: dict[str, Any], **changes: Any) -> TrainConfig:
    """The toy run with `num_generations: auto` and prompts of known length."""
    dataset = toy["dataset"] | {"max_prompt_length": 8}
    rollout = {"num_generations": "auto", "max_completion_length": 8}
    return TrainConfig.model_validate(toy | {"dataset": dataset, "rollout": rollout} | changes)


@pytest.fixture(scope="module")
def traces(toy: dict[str, Any]) -> Traces:
    return Traces(model_config(toy["model"]["path"]))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, toy: dict[str, Any], traces: Traces) -> Any:
    """`memory(generations=5)`: the device has what so many completions need; `memory(bytes)`: so much."""
    monkeypatch.setattr(auto, "_traces_of", lambda _: traces)

    def give(total: int = 0, generations: int | None = None) -> None:
        if generations is not None:
            rollout = {"num_generations": generations, "max_completion_length": 8}
            found = plan(auto_run(toy, rollout=rollout), traces, GPU, knobs=False)
            total = GPU.total - found.prediction.free
        monkeypatch.setattr(auto, "device_budget", lambda _: replace(GPU, total=total))

    return give


def test_auto_takes_what_fits_up_to_what_is_usual(
    toy: dict[str, Any], memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = []
    for given in ({"total": 1 << 30}, {"generations": 20}, {"generations": 2}):
        memory(**given)
        sizes.append(resolve_auto(auto_run(toy)).rollout.num_generations)

    # The largest of those that take as much: how even the micro-batches are plays a part.
    assert AUTO_MOST == sizes[0] > sizes[1] >= 20 > sizes[2] >= 2
    assert "rollout.num_generations = auto: 64" in caplog.text


@pytest.mark.parametrize(
    ("total", "length", "message"),
    [(1 << 16, 8, r"need .* gpu has 64\.0 KiB"), (1 << 30, None, "max_prompt_length")],
    ids=["not even two fit", "prompts of unknown length"],
)
def test_auto_says_why_it_finds_no_number(
    total: int, length: int | None, message: str, toy: dict[str, Any], memory: Any
) -> None:
    memory(total)

    with pytest.raises(ValueError, match=rf"num_generations.*{message}"):
        resolve_auto(auto_run(toy, dataset=toy["dataset"] | {"max_prompt_length": length}))


def test_a_cpu_and_training_without_rollouts_take_constants_and_numbers_stay(toy: dict[str, Any]) -> None:
    own = {key: toy[key] for key in ("dataset", "rewards")} | {"model": {"path": "-", "device": "cpu"}}

    found = resolve_auto(TrainConfig.model_validate(own))
    preference = resolve_auto(TrainConfig.model_validate(own | {"algorithm": "dpo", "rewards": []}))

    assert (found.rollout.num_generations, found.micro_batch_tokens) == (8, 16_384)
    assert found.model.gradient_checkpointing is preference.model.gradient_checkpointing is False
    assert preference.micro_batch_tokens == 16_384
    set_by_hand = TrainConfig.model_validate(
        toy | {"model": own["model"] | {"gradient_checkpointing": "mlp"}}
    )
    assert resolve_auto(set_by_hand) == set_by_hand


def test_a_stage_can_leave_its_own_group_to_auto(toy: dict[str, Any], memory: Any) -> None:
    memory(generations=30)
    longer = {"rollout": {"max_completion_length": 64}}
    first = {"name": "short", "steps": 2}

    def resolved(*stages: dict[str, Any]) -> list[int]:
        """Of the run, and of each stage that says something of its own."""
        found = resolve_auto(auto_run(toy, stages=list(stages)))
        own = [stage.overrides.get("rollout", {}).get("num_generations") for stage in found.stages]
        return [found.rollout.num_generations, *(size for size in own if size is not None)]

    (alone,) = resolved()
    (inherited,) = resolved(first, {"name": "long", "overrides": longer})
    own = {"rollout": longer["rollout"] | {"num_generations": "auto"}}
    assert resolved(first, {"name": "long", "overrides": own}) == [alone, inherited]
    assert inherited < alone
    numbers = [{**first, "overrides": {"rollout": {"num_generations": 4}}}]
    assert resolved(*numbers, {"name": "long", "overrides": {"rollout": {"num_generations": 6}}}) == [4, 4, 6]


def test_a_resumed_run_keeps_its_group_whatever_memory_there_is(
    toy: dict[str, Any], memory: Any, tmp_path: Path
) -> None:
    memory(generations=5)
    own = {"rollout": {"num_generations": "auto", "max_completion_length": 16}}
    stages = [{"name": "a", "steps": 1}, {"name": "b", "overrides": own}]
    config = auto_run(toy, stages=stages, max_steps=2, evaluation={}, output_dir=str(tmp_path / "run"))
    train(config, display=False)
    started = load_config(tmp_path / "run")

    memory(1 << 30)
    train(config.model_copy(update={"max_steps": 3}), resume="latest", display=False)

    assert started.rollout.num_generations == 5
    assert load_config(tmp_path / "run") == started.model_copy(update={"max_steps": 3})


@pytest.mark.parametrize("command", [["generate"], ["groups", "describe"]], ids=str)
def test_a_look_before_training_resolves_auto_too(
    command: list[str], toy: dict[str, Any], memory: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory(generations=5)
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
