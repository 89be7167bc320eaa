"""Whole runs that generate with vLLM: what it samples is what the trainer trains on, also after a stop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from grpo_fast.config import TrainConfig
from grpo_fast.run import build_trainer, train
from grpo_fast.run_record.checkpoint import CheckpointStore

STEPS = 5
# The largest difference of a token, in nats, as in test_weights.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.3}


@pytest.fixture(scope="module")
def vllm_toy(toy: dict[str, Any], served_folder) -> dict[str, Any]:
    """The toy run with a model that vLLM takes."""
    folder = served_folder(tokenizer=AutoTokenizer.from_pretrained(toy["model"]["path"]))
    return {
        **toy,
        "max_steps": STEPS,
        "model": {**toy["model"], "path": str(folder)},
        "rollout": {**toy["rollout"], "engine": "vllm", "vllm": {"kv_cache_gib": 0.05}},
    }


@pytest.mark.parametrize("dtype", ROUNDING)
def test_sampler_and_trainer_agree_after_every_sync_of_a_run(vllm_toy, dtype):
    config = TrainConfig(**{**vllm_toy, "model": {**vllm_toy["model"], "dtype": dtype}})
    trainer = build_trainer(config)
    before = {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}

    with trainer.engine:
        metrics = [trainer.train_step().metrics for _ in range(STEPS)]

    assert trainer.engine.name == "vllm"
    assert max(step["sampling/logp_difference_max"] for step in metrics) < ROUNDING[dtype]
    assert not all(torch.equal(p, before[name]) for name, p in trainer.policy.trainable().items())


def test_a_run_on_shared_weights_trains_saves_and_goes_on(
    vllm_toy, plain_layouts, tmp_path: Path, largest_difference
):
    rollout = {**vllm_toy["rollout"], "vllm": {"kv_cache_gib": 0.05, "share_weights": True}}
    config = TrainConfig(**{**vllm_toy, "rollout": rollout})
    with plain_layouts():
        trainer = build_trainer(config)
    prompts = [prompt.token_ids for prompt in trainer.held_out]

    with trainer.engine as engine:
        assert engine.sync_way == "shared"
        metrics = [trainer.train_step().metrics for _ in range(2)]
        saved = {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}
        store = CheckpointStore(tmp_path / "checkpoints", keep=1)
        store.save(2, tensors={"trainable": trainer.policy.trainable()}, state={})
        metrics.append(trainer.train_step().metrics)
        trainer.policy.load_trainable(store.load_latest().tensors["trainable"])
        engine.sync(trainer.policy)
        engine.wake()
        groups = engine.generate(prompts, 2, trainer.sampling)

        assert max(step["sampling/logp_difference_max"] for step in metrics) < ROUNDING["float32"]
        assert all(torch.equal(p, saved[name]) for name, p in trainer.policy.trainable().items())
        assert largest_difference(trainer.policy, prompts, groups) < ROUNDING["float32"]


def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(vllm_toy, tmp_path: Path, seed: int):
    stopped_at = random.Random(seed).randrange(1, STEPS)
    files = {"logging": {"tensorboard": False, "samples_every": 1}, "evaluation": {}}

    def run(name: str, steps: int, resume: str | None = None) -> Path:
        config = TrainConfig(**{**vllm_toy, **files, "max_steps": steps, "output_dir": str(tmp_path / name)})
        return train(config, resume=resume, display=False)

    whole, stopped = run("whole", STEPS), run("stopped", stopped_at)
    run("stopped", STEPS, resume="latest")

    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()
    ends = [CheckpointStore(folder / "checkpoints").load_latest() for folder in (whole, stopped)]
    assert ends[0].step == ends[1].step == STEPS
    for name, tensor in ends[0].tensors["trainable"].items():
        assert tensor.equal(ends[1].tensors["trainable"][name]), name
