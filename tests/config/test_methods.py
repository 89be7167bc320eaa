"""A method by one word: what it sets, what the user sets beside it, and what is said of it."""

from __future__ import annotations

import importlib
import logging
import math
from typing import Any

import pytest
import torch
import yaml

from grpo_fast.config.load import dump_config, load_config
from grpo_fast.config.methods import departures, describe_method
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.section import at
from grpo_fast.config.stages import resolve_stages
from grpo_fast.loop.collect import overlong_penalties
from grpo_fast.objective import GRPOLossConfig
from grpo_fast.objective.catalog import CATALOG, LOSS_TYPES, METHODS
from grpo_fast.record.logs import Clock

MINIMAL: dict[str, Any] = {
    "model": {"path": "some/model"},
    "dataset": {"source": "rows.jsonl"},
    "rewards": [{"reward": "exact_match"}],
}


def run_of(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate(MINIMAL | settings)


def test_every_loss_is_a_method_and_each_sets_what_it_says():
    assert set(LOSS_TYPES) <= METHODS.keys()
    for name, own in METHODS.items():
        config = run_of(method=name, **({"reference": {"path": "t"}} if name in ("opd", "gkd") else {}))
        assert {key: at(config, key) for key in own} == own, name
        assert not departures(config, name) and describe_method(config).startswith(
            f"{name} sets loss.loss_type="
        )
        assert TrainConfig.model_validate(yaml.safe_load(dump_config(config))) == config


def test_what_the_user_sets_wins_and_is_said_to_be_no_longer_the_method():
    config = run_of(method="rloo", loss={"beta": 0.1}, advantage={"scale_rewards": "batch"})
    assert config.loss.kl_in_reward and config.advantage.baseline == "leave_one_out"
    assert departures(config, "rloo") == {
        "loss.beta": (0.1, METHODS["rloo"]["loss.beta"]),
        "advantage.scale_rewards": ("batch", "none"),
    }
    text = describe_method(config)
    assert "advantage.baseline='leave_one_out'" in text.partition("; no longer rloo: ")[0]
    assert "advantage.scale_rewards='batch' (not 'none')" in text.partition("; no longer rloo: ")[2]


def test_another_loss_leaves_out_the_methods_keys_of_its_own():
    config = run_of(method="dapo", loss={"loss_type": "gspo"})
    assert config.loss == GRPOLossConfig("gspo") and config.advantage.dynamic_sampling
    assert departures(config, "dapo")["loss.loss_type"] == ("gspo", "dapo")
    assert run_of(method="dapo", loss=GRPOLossConfig("grpo")).loss == GRPOLossConfig("grpo")


def test_a_method_on_the_command_line_replaces_what_the_file_says_of_another(tmp_path, caplog):
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(MINIMAL | {"loss": {"loss_type": "dapo", "delta": 3.0}, "old_logprobs": "sampler"})
    )
    config = load_config(file, ["--method", "rloo", "loss.beta=0.2"])
    assert config == run_of(method="rloo", loss={"beta": 0.2})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "loss.delta=3.0" in record.message
    file.write_text(yaml.safe_dump(MINIMAL | {"method": "rloo", "loss": {"beta": 0.3}}))
    assert load_config(file, ["method=rloo"]).loss.beta == 0.3
    assert load_config(file, ["loss_type=dapo"]).advantage.baseline == "leave_one_out"
    assert len(caplog.records) == 1


def test_a_stage_may_take_another_method_or_depart_from_the_runs():
    stages = [
        {"name": "a", "steps": 5},
        {"name": "b", "steps": 5, "overrides": {"loss": {"beta": 0.0}}},
        {"name": "c", "overrides": {"method": "dr_grpo", "advantage": {"mask_truncated": True}}},
    ]
    run = run_of(method="rloo", stages=stages, advantage={"max_draws": 9, "dynamic_sampling": True})
    a, b, c = (stage.config for stage in resolve_stages(run))
    assert not departures(a, "rloo") and a.advantage.max_draws == 9
    assert departures(b, "rloo").keys() == {"loss.beta"}
    assert not departures(c, "dr_grpo") and c.advantage.mask_truncated and c.loss == GRPOLossConfig("dr_grpo")


def test_a_surrogate_alone_says_when_advantages_are_not_its_papers():
    alone = "loss_type = rloo sets the surrogate alone; advantages are not those of rloo, by"
    text = describe_method(run_of(loss={"loss_type": "rloo", "beta": 0.1}))
    assert text.startswith(alone) and text.endswith("`method: rloo` sets them")
    assert all(
        name in text for name in ("advantage.baseline", "advantage.scale_rewards", "loss.kl_in_reward")
    )
    assert "kl_in_reward" not in describe_method(run_of(loss={"loss_type": "rloo"}))
    assert not describe_method(run_of()) and not describe_method(run_of(loss={"loss_type": "grpo"}))
    assert not describe_method(run_of(loss={"loss_type": "rloo"}, advantage={"function": "mine:own"}))
    assert not describe_method(run_of(loss={"loss_type": "mine:loss"}))


def test_a_soft_punishment_falls_over_the_last_share_of_the_limit(make_trainer):
    trainer = make_trainer(advantage={"soft_overlong": 0.5}, rollout={"max_completion_length": 8})
    table, _ = trainer.collect(Clock())
    penalties = overlong_penalties(table, 8, 0.5)
    expected = (table.lengths - 4).clamp(min=0) / 4  # DAPO, arXiv 2503.14476
    torch.testing.assert_close(penalties, expected.float())
    torch.testing.assert_close(table.facts["reward"], table.facts["reward_table"].sum(1) - penalties)


OWN = """
from grpo_fast.objective import LossOutputs
from grpo_fast.objective.catalog import CATALOG, LossFacts
from grpo_fast.objective.surrogates import Surrogate

def whole(inputs):
    return LossOutputs(-(inputs.logprobs * inputs.advantages)[inputs.loss_mask].mean())

def squared(tokens, config):
    return Surrogate(-tokens.advantages * tokens.logprobs.square(), tokens.log_ratio.detach().exp())

CATALOG["squared"] = LossFacts("none", "token_mean", __name__ + ":squared")
"""


@pytest.mark.parametrize("loss_type", ["own_losses:whole", "squared"])
def test_a_loss_of_ones_own_a_whole_one_or_a_row_of_the_catalogue_trains(
    loss_type, make_trainer, tmp_path, monkeypatch
):
    (tmp_path / "own_losses.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(CATALOG, "squared", None)  # to be taken out again
    importlib.reload(importlib.import_module("own_losses"))
    trainer = make_trainer(loss={"loss_type": loss_type}, rollout={"num_generations": 2})
    metrics = trainer.train_step().metrics
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", [n for n, own in METHODS.items() if own["loss.loss_type"] in CATALOG])
@pytest.mark.drawn(12)
def test_every_method_trains(name, make_trainer, seed):
    trainer = make_trainer(method=name, seed=seed, minibatches=2, rollout={"num_generations": 2})
    before = {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}
    metrics = trainer.train_step().metrics
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    assert any(not torch.equal(p, before[name]) for name, p in trainer.policy.trainable().items())
