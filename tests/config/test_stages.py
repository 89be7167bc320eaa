"""Stages: what each trains with, which step belongs to which, and that a resumed run is in the right one."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.stages import resolve_stages, schedule_steps, stage_at
from grpo_fast.record.checkpoint import CheckpointStore
from grpo_fast.run import train

MINIMAL = {
    "model": {"path": "some/model"},
    "dataset": {"source": "rows.jsonl", "rename": {"q": "prompt"}},
    "rewards": [{"reward": "exact_match"}],
    "loss": {"loss_type": "grpo", "beta": 0.1, "epsilon_low": 0.3},
    "max_steps": 10,
}


def stage(
    name: str = "a", steps: int | None = None, *, fresh_optimizer: bool = False, **overrides: Any
) -> dict[str, Any]:
    return {"name": name, "steps": steps, "fresh_optimizer": fresh_optimizer, "overrides": overrides}


def stages_of(*stages: dict[str, Any], **changes: Any) -> TrainConfig:
    return TrainConfig(**{**MINIMAL, "stages": list(stages), **changes})


def test_stages_follow_each_other_and_the_last_takes_what_remains():
    stages = resolve_stages(stages_of(stage("a", 3), stage("b", 5), stage("c")))
    assert [(one.name, one.start, one.end) for one in stages] == [("a", 0, 3), ("b", 3, 8), ("c", 8, 10)]
    assert [stage_at(stages, step) for step in range(12)] == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    (whole,) = resolve_stages(stages_of())
    assert (whole.start, whole.end, whole.config) == (0, 10, stages_of())


def test_an_override_changes_its_keys_and_another_loss_its_whole_section():
    first, second, third = resolve_stages(
        stages_of(
            stage("a", 5, loss={"beta": 0.0}, dataset={"size": 7}, groups={"strategy": "similarity"}),
            stage("b", 3, rewards=[{"reward": "format"}], prompts_per_step=3),
            stage("c", loss={"loss_type": "cispo"}, dataset={"source": "other.jsonl"}),
        )
    )
    assert (first.config.loss.beta, first.config.loss.epsilon_low) == (0.0, 0.3)
    assert first.config.dataset.size == 7 and first.config.dataset.rename == {"q": "prompt"}
    assert first.config.groups.strategy == "semantic"
    assert [reward.reward for reward in second.config.rewards] == ["format"]
    assert second.config.loss == stages_of().loss and second.config.prompts_per_step == 3
    assert third.config.loss.loss_type == "cispo" and third.config.loss.beta == 0
    assert third.config.dataset.rename == {}


def test_a_learning_rate_schedule_spans_from_one_fresh_optimizer_to_the_next():
    whole = (stage("a", 2), stage("b", 4), stage("c", 3, fresh_optimizer=True, minibatches=3), stage("d", 1))
    stages = resolve_stages(stages_of(*whole))
    assert [schedule_steps(stages, i) for i in range(4)] == [6, 6, 4, 4]


def staged(toy: dict[str, Any], tmp_path: Path, run: str, **changes: Any) -> TrainConfig:
    """Three stages, each with something that must come back exactly: weights, pass rates, groups, moments."""
    (tmp_path / "more.py").write_text(
        "def variety(completions, **columns):\n    return [float(len(set(t.split()))) for t in completions]\n"
    )
    both = [toy["rewards"][0], {"reward": f"{tmp_path / 'more.py'}:variety", "weight": 0.1}]
    easy = {"curriculum": {"threshold": 0.2, "smoothing": 0.7}, "rewards": both}
    groups = {
        "groups": {"strategy": "similarity", "similarity_threshold": 0.1},
        "rewards": both,
        "adaptive_weights": {"targets": {"variety": 9.0}, "rate": 0.5},
        "advantage": {"multi_objective_aggregation": "normalize_then_sum"},
        "loss": {"beta": 0.05},
    }
    config = {
        **toy,
        "seed": 3,
        "threads": 1,
        "max_steps": 9,
        "output_dir": str(tmp_path / run),
        "evaluation": {**toy["evaluation"], "every": 2},
        "alerts": {"window": 2, "unique_completions": 0.99, "length_reward_correlation": 0.05},
        "checkpoint": {"every": 1, "keep": 9},
        "optimizer": {**toy["optimizer"], "schedule": "linear", "warmup_steps": 1},
        "stages": [
            stage("easy", 3, **easy),
            stage("groups", 3, fresh_optimizer=True, **groups),
            stage("last", rollout={"max_completion_length": 5}),
        ],
    }
    return TrainConfig(**{**config, **changes})


FILES = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "alerts.jsonl")


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The staged run without an interruption, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_dir = train(staged(toy, tmp_path_factory.mktemp("staged"), "whole")).run_dir
    return run_dir, printed.getvalue()


def test_a_staged_run_resumed_anywhere_equals_one_that_was_not_interrupted(toy, whole, contents, seed: int):
    whole_dir, _ = whole
    expected = CheckpointStore(whole_dir / "checkpoints").load_latest()
    # Half of the time right at the change of stage, else somewhere within one.
    step = random.Random(seed).choice([3, 6] * 3 + [1, 2, 4, 5, 7, 8])
    run_dir = whole_dir.with_name(f"resumed-{step}")
    shutil.copytree(whole_dir, run_dir)
    for later in range(step + 1, 10):  # a kill right after a checkpoint leaves the logs ahead of it
        shutil.rmtree(run_dir / "checkpoints" / f"step-{later:08d}")
    train(staged(toy, whole_dir.parent, run_dir.name), resume="latest", display=False)
    found = CheckpointStore(run_dir / "checkpoints").load_latest()
    assert found.step == 9 and found.state == expected.state
    before, after = contents(expected), contents(found)
    assert not [name for name, tensor in before.items() if not tensor.equal(after[name])], f"from {step}"
    for name in FILES:
        assert (run_dir / name).read_bytes() == (whole_dir / name).read_bytes(), f"from {step}: {name}"


def test_every_stage_trains_with_what_it_overrides(whole):
    run_dir, printed = whole
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    assert [step["stage"] for step in steps] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert ["curriculum/pass_rate" in step for step in steps] == [True] * 3 + [False] * 6
    assert ["groups/sharing" in step for step in steps] == [False] * 3 + [True] * 3 + [False] * 3
    assert ["reward/variety/weight" in step for step in steps] == [False] * 3 + [True] * 3 + [False] * 3
    assert ["reward/variety/mean" in step for step in steps] == [True] * 6 + [False] * 3
    assert ["kl" in step for step in steps] == [False] * 3 + [True] * 3 + [False] * 3
    assert all(step["completion/length_max"] <= 5 for step in steps[6:])
    # The schedule begins anew with the fresh optimizer, and goes on over the last two stages.
    rates = [step["learning_rate"] for step in steps]
    assert rates[0] == rates[1] == rates[3] == rates[4] == 3e-3
    assert rates[2] < rates[1] and rates[4] > rates[5] > rates[6] > rates[7] > rates[8] > 0
    # Alerts are written down and shown.
    alerts = [json.loads(line) for line in (run_dir / "alerts.jsonl").read_text().splitlines()]
    assert alerts and all(alert["text"] in printed for alert in alerts)


def test_a_stage_without_fresh_optimizer_keeps_the_moments(toy, contents, tmp_path: Path):
    first, second = stage("a", 1), stage("b", rollout={"temperature": 1.0})

    def weights(name: str, *stages: dict[str, Any]) -> dict[str, torch.Tensor]:
        changes = {"evaluation": {}, "optimizer": toy["optimizer"]}
        config = staged(toy, tmp_path, name, max_steps=2, stages=list(stages), **changes)
        found = CheckpointStore(train(config, display=False).run_dir / "checkpoints").load_latest()
        return {name: tensor for name, tensor in contents(found).items() if name.startswith("master.")}

    plain, kept = weights("plain"), weights("kept", first, second)
    fresh = weights("fresh", first, {**second, "fresh_optimizer": True})

    assert all(torch.equal(plain[name], kept[name]) for name in plain)
    assert not all(torch.equal(plain[name], fresh[name]) for name in plain)
