"""Whole runs that generate with vLLM: what it samples is what the trainer trains on, also after a kill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from grpo_fast.config import TrainConfig
from grpo_fast.config_io import load_config
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


@pytest.mark.timeout(1800)  # on a fresh machine the weights are converted first
def test_a_real_language_model_trains_through_vllm():
    overrides = ["rollout.engine=vllm", "rollout.vllm.kv_cache_gib=0.1", "rollout.num_generations=4"]
    overrides += [
        "prompts_per_step=4",
        "max_steps=3",
        "evaluation.dataset.size=8",
        "advantage.skip_flat_groups=false",
    ]
    trainer = build_trainer(load_config("quickstart", overrides))
    before = {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}

    with trainer.engine:
        score = trainer.evaluate().score
        metrics = [trainer.train_step().metrics for _ in range(3)]

    assert 0 <= score <= 1
    assert max(step["sampling/logp_difference_max"] for step in metrics) < 2 * ROUNDING["bfloat16"]
    assert max(step["sampling/logp_difference_mean"] for step in metrics) < ROUNDING["bfloat16"] / 3
    assert not all(torch.equal(p, before[name]) for name, p in trainer.policy.trainable().items())


def start(config_file: Path, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "grpo_fast", "train", str(config_file), f"output_dir={run_dir}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output


@pytest.mark.timeout(1800)  # two processes that import and start vLLM, on a busy machine
def test_a_run_that_was_killed_and_resumed_equals_one_that_was_not(vllm_toy, tmp_path: Path):
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    config = {
        **vllm_toy,
        "threads": 1,
        "checkpoint": {"every": 1},
        "logging": {"tensorboard": False, "samples_every": 1},
    }
    config_file, killed = tmp_path / "run.yaml", tmp_path / "killed"
    config_file.write_text(yaml.safe_dump(config))
    train(load_config(config_file, [f"output_dir={tmp_path / 'whole'}"]), display=False)

    process, log, wanted = start(config_file, killed), killed / "metrics.jsonl", rng.randrange(2, STEPS)
    while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < wanted):
        time.sleep(0.01)
    time.sleep(rng.random() * 0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finish(start(config_file, killed, "--resume"))

    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    whole, resumed = (CheckpointStore(d / "checkpoints").load_latest() for d in (tmp_path / "whole", killed))
    assert whole.step == resumed.step == STEPS
    for name, tensor in whole.tensors["trainable"].items():
        assert tensor.equal(resumed.tensors["trainable"][name]), name
