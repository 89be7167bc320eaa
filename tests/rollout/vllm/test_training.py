"""Whole runs that generate with vLLM: what it samples is what the trainer trains on, also after a stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from grpo_fast.config.policy import OptimizerConfig
from grpo_fast.config.rollout import MemoryConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.policy import PolicyOptimizer
from grpo_fast.record.checkpoint import CheckpointStore
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.handover import DeviceHandover
from grpo_fast.rollout.vllm.engine import SMALLER
from grpo_fast.rollout.vllm.sleep import SleepCycle
from grpo_fast.run import train

STEPS = 3
ROUNDING = 1e-3  # the largest difference of a token, in nats


@pytest.fixture(scope="module")
def vllm_toy(toy: dict[str, Any], saved_model) -> dict[str, Any]:
    """The toy run with a model that vLLM takes; its head is reloaded by itself."""
    folder = saved_model(tied=False, own=AutoTokenizer.from_pretrained(toy["model"]["path"]))
    return {
        **toy,
        "max_steps": STEPS,
        "model": {**toy["model"], "path": str(folder)},
        "rollout": {**toy["rollout"], "engine": "vllm", "vllm": {"kv_cache_gib": 0.05}},
        "logging": {"tensorboard": False, "samples_every": 1},
        "evaluation": {},
    }


def test_sampler_and_trainer_agree_and_a_resumed_run_is_the_whole_one(
    vllm_toy, on_vllms_cpu, contents, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("grpo_fast.loop.trainer.COMPARE_EVERY", 2)
    run, whole = tmp_path / "run", tmp_path / "whole"
    uncorrected = vllm_toy | {"loss": {"sampler_correction": "none"}}
    config = TrainConfig(**uncorrected, checkpoint={"every": 1, "keep": STEPS}, output_dir=str(run))
    train(config, display=False)
    shutil.copytree(run, whole)
    for later in CheckpointStore(run / "checkpoints").paths()[1:]:
        shutil.rmtree(later)
    train(config, resume="latest", display=False)

    steps = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    differences = [step.get("sampling/logp_difference_max") for step in steps]
    assert differences[2] is None and max(differences[1], differences[3]) < ROUNDING
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    ends = [CheckpointStore(folder / "checkpoints").load_latest() for folder in (whole, run)]
    assert ends[0].step == ends[1].step == STEPS
    first, second = map(contents, ends)
    for name, tensor in first.items():
        assert tensor.equal(second[name]), name


def test_a_wake_without_room_starts_it_once_more_with_less(
    saved_model, running_vllm, shake, largest_difference, monkeypatch
):
    with running_vllm(saved_model(tied=False), dtype="float32") as (engine, policy):
        prompts, sampling = [(5, 6, 7), (8, 9, 10, 11, 12)], Sampling(max_completion_length=20, seed=11)
        blocks = [engine._vllm.vllm_config.cache_config.num_gpu_blocks]
        optimizer = PolicyOptimizer(policy.trainable(), OptimizerConfig(), total_steps=1)
        handover = DeviceHandover(engine, policy, optimizer, MemoryConfig(offload="none"))
        shake(policy)
        wake, room = SleepCycle.wake, [False]

        def without_room(cycle: SleepCycle) -> None:
            if not room[0]:
                room[0] = True
                raise RuntimeError("vLLM could not take back its memory (kv_cache): out of memory")
            wake(cycle)

        monkeypatch.setattr(SleepCycle, "wake", without_room)
        handover.to_engine()

        blocks.append(engine._vllm.vllm_config.cache_config.num_gpu_blocks)
        assert blocks[1] == pytest.approx(SMALLER * blocks[0], abs=1)
        assert largest_difference(policy, prompts, engine.generate(prompts, 2, sampling)) < 1e-3
        handover.to_trainer()
        room[0] = False
        with pytest.raises(RuntimeError, match="kv_cache"):
            handover.to_engine()
