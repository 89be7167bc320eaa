"""What a user adds from outside: rows of the tables, rewards that log, and runs that train with them."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

from grpo_fast.config.schema import TrainConfig
from grpo_fast.objective.catalog import CATALOG, METHODS
from grpo_fast.objective.estimators import BASELINES, SCALES
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import Clock
from grpo_fast.rewards import RewardError
from grpo_fast.rewards.types import Log
from grpo_fast.run import train

OWN = """
import dataclasses

from grpo_fast.objective.estimators import BASELINES, SCALES
from grpo_fast.objective import LossOutputs
from grpo_fast.objective.catalog import CATALOG, METHODS, LossFacts
from grpo_fast.objective.surrogates import Surrogate
from grpo_fast.rollout.engines import TransformersKind

seen = {}

class Watched(TransformersKind):
    name = "watched"

    def make(self, config, policy, *, max_length, world):
        engine = super().make(config, policy, max_length=max_length, world=world)
        engine.name, seen["engine"] = self.name, engine
        return engine

def squared(tokens, config):
    return Surrogate(-tokens.advantages * tokens.logprobs.square(), tokens.log_ratio.detach().exp())

def of_the_best(centred, of):
    return centred - centred.amax(1, keepdim=True)

def by_count(centred, of):
    return centred / of.count

CATALOG["squared"] = LossFacts("none", "token_mean", __name__ + ":squared")
BASELINES["best"] = of_the_best
SCALES["count"] = by_count
METHODS["mine"] = {
    "loss.loss_type": "squared", "advantage.baseline": "best", "advantage.scale_rewards": "count"
}

def teach(engine, prompts, sampling):
    found = []
    for prompt in prompts:
        ((completion,),) = engine.generate([prompt.token_ids], 1, sampling)
        told = {"teacher_logprobs": [-0.5 * token for token in completion.token_ids]}
        found.append(dataclasses.replace(completion, columns=told))
    return found

def distil(inputs):
    seen.update(inputs.columns, targets=len(inputs.logprobs))
    apart = inputs.logprobs - inputs.columns["teacher_logprobs"]
    return LossOutputs((apart.square() * inputs.loss_mask).mean())
"""


@pytest.fixture
def outside(tmp_path, monkeypatch) -> Any:
    """The user's module; its rows leave the tables after the test."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    tables = (CATALOG, BASELINES, SCALES, METHODS)
    before = [dict(table) for table in tables]
    importlib.invalidate_caches()
    yield importlib.reload(importlib.import_module("mine"))
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


def test_a_users_method_trains_with_a_users_engine(outside, make_trainer) -> None:
    trainer = make_trainer(method="mine", rollout={"engine": "mine:Watched"})
    assert trainer.engine is outside.seen["engine"]
    assert (trainer.config.loss.loss_type, trainer.config.advantage.baseline) == ("squared", "best")
    metrics = trainer.train_step().metrics
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    table, _ = trainer.collect(Clock())
    advantages = table.by_group("advantage")
    assert (advantages <= 0).all() and (advantages.amax(1) == 0).all()


def test_a_users_column_reaches_a_users_loss(outside, make_trainer) -> None:
    trainer = make_trainer(rollout={"function": "mine:teach"}, loss={"loss_type": "mine:distil"})
    before = trainer.train_step().metrics["loss"]
    assert len(outside.seen["teacher_logprobs"]) == outside.seen["targets"] > 0
    losses = [trainer.train_step().metrics["loss"] for _ in range(3)]
    assert losses[-1] < before


def test_an_unknown_name_is_refused_with_the_nearest(make_trainer) -> None:
    with pytest.raises(ValueError, match=r"is no scale; there are .*did you mean 'group'"):
        make_trainer(advantage={"scale_rewards": "groups"})


LOGGING = """
def logs(completions, trainer_state, log_metric, log_extra, **columns):
    assert columns.keys() >= {"prompts", "completion_ids"} and trainer_state.max_steps == 2
    log_metric("step", trainer_state.global_step)
    log_metric("characters", sum(map(len, completions)) / len(completions))
    log_extra("length", [len(completion) for completion in completions])
    return [float(len(completion)) for completion in completions]

def bad(completions, log_extra, **columns):
    log_extra("length", [1])
    return [0.0] * len(completions)
"""


@pytest.mark.parametrize("per_group", [False, True])
def test_a_reward_gets_the_step_and_its_logs_are_kept(toy, tmp_path, per_group: bool) -> None:
    (tmp_path / "own.py").write_text(LOGGING)
    changes = {"threads": 1, "max_steps": 2, "logging": {"tensorboard": False, "samples_every": 1}}

    def run(name: str) -> Path:
        rewards = [{"reward": f"{tmp_path / 'own.py'}:{name}", "per_group": per_group}]
        config = TrainConfig(**toy | changes | {"rewards": rewards, "output_dir": str(tmp_path / name)})
        return train(config, display=False).run_dir

    before, *steps = read_jsonl(run("logs") / "metrics.jsonl")
    assert before["eval/logged/step"] == 0 and steps[-1]["eval/logged/step"] == 2
    assert [step["logged/step"] for step in steps] == [0, 1]
    for step in steps:
        assert step["logged/characters"] == pytest.approx(step["reward/logs/mean"])
    samples = read_jsonl(tmp_path / "logs" / "samples.jsonl")
    assert samples and all(sample["extra"] == {"length": sample["rewards"]["logs"]} for sample in samples)

    with pytest.raises(RewardError, match=r"log_extra\('length'\) has 1 values for \d+ completions"):
        run("bad")
    with pytest.raises(ValueError, match=r"log_metric\('ratio'\) has nan: log a finite number"):
        Log(1).log_metric("ratio", math.nan)
