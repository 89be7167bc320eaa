"""What a user adds from outside: one file with a row of each table, and runs that train with them."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

from grpo_fast.objective.catalog import CATALOG, METHODS
from grpo_fast.objective.estimators import BASELINES, SCALES
from grpo_fast.record.logs import Clock

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

CATALOG["squared"] = LossFacts("none", "token_mean", __name__ + ":squared", advantages="any")
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


def test_a_method_of_a_loss_a_baseline_and_a_scale_of_ones_own_trains_with_an_engine_of_ones_own(
    outside, make_trainer
) -> None:
    trainer = make_trainer(method="mine", rollout={"engine": "mine:Watched"})
    assert trainer.engine is outside.seen["engine"]
    assert (trainer.config.loss.loss_type, trainer.config.advantage.baseline) == ("squared", "best")
    metrics = trainer.train_step().metrics
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    table, _ = trainer.collect(Clock())
    advantages = table.by_group("advantage")
    assert (advantages <= 0).all() and (advantages.amax(1) == 0).all()


def test_a_column_of_a_rollouts_own_reaches_a_loss_of_ones_own(outside, make_trainer) -> None:
    trainer = make_trainer(rollout={"function": "mine:teach"}, loss={"loss_type": "mine:distil"})
    before = trainer.train_step().metrics["loss"]
    assert len(outside.seen["teacher_logprobs"]) == outside.seen["targets"] > 0
    losses = [trainer.train_step().metrics["loss"] for _ in range(5)]
    assert losses[-1] < before


def test_a_name_that_is_in_no_table_is_told_with_the_nearest(make_trainer) -> None:
    with pytest.raises(ValueError, match=r"is no scale; there are .*did you mean 'group'"):
        make_trainer(advantage={"scale_rewards": "groups"})
