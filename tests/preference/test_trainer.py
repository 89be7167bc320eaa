"""Training on fixed completions: gradients whatever the micro-batches, learning, resuming."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.preference.trainer import PreferenceTrainer
from grpo_fast.run import train
from grpo_fast.run.build import build_preference_trainer
from grpo_fast.run_record.logs import Clock

KTO, AOT = ({"loss": {"loss_type": name}} for name in ("kto", "aot"))


def gradients(trainer: PreferenceTrainer, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, dict[str, float]]:
    """Of a step on fixed comparisons, and its metrics; no weight moves."""
    monkeypatch.setattr(trainer.optimizer, "step", lambda: 0.0)
    metrics = trainer.update(list(trainer.comparisons.values())[:8], Clock())
    return {name: p.grad.clone() for name, p in trainer.policy.trainable().items()}, metrics


@pytest.mark.parametrize(
    ("algorithm", "preference"),
    [
        ("dpo", {"loss": {"loss_type": ["sigmoid", "sft"]}}),
        ("dpo", {"loss": {"loss_type": "simpo"}}),
        ("dpo", KTO),
        ("dpo", AOT),
        ("rank", {"ranking": {"objective": "plackett_luce"}}),
        ("rank", {"ranking": {"objective": "advantage"}}),
    ],
)
def test_neither_micro_batches_nor_the_heads_gradient_in_place_change_anything(
    algorithm, preference, make_run, monkeypatch
):
    config = make_run(algorithm, preference)
    small = config.model_copy(update={"micro_batch_tokens": 25})
    results = []
    for settings, in_place in ((config, False), (small, True)):
        torch.manual_seed(0)
        trainer = build_preference_trainer(settings)
        with torch.no_grad():  # away from the reference, where some losses have no curvature to show
            for parameter in trainer.policy.trainable().values():
                parameter.add_(0.05 * torch.randn_like(parameter))
        if not in_place:
            monkeypatch.setattr(trainer.optimizer, "gradient_of", lambda parameter: None)
        results.append(gradients(trainer, monkeypatch))

    (whole, metrics), (split, split_metrics) = results
    for name, gradient in whole.items():
        assert (split[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name
    assert split_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "preference", "metric"),
    [("dpo", KTO, "rewards/margins"), ("rank", {}, "ranking/pairwise_accuracy")],
)
def test_training_lifts_the_held_out_score(algorithm, preference, metric, make_run):
    config = make_run(algorithm, preference, max_steps=12, size=96, optimizer={"learning_rate": 8e-3})
    run_dir = train(config, display=False).run_dir
    lines = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["held-out", "held-out"]
    print(f"{lines[0]['score']:.3f} -> {lines[1]['score']:.3f}")
    # Chance is a half.
    assert lines[1]["score"] > max(0.85, lines[0]["score"] + 0.2)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1][metric] > steps[1][metric]
    assert {"eval/ranking/sum/kendall_tau", "eval/ranking/mean/top1_accuracy"} <= steps[-1].keys()
    assert (run_dir / "report.html").exists()


def run_out_of_memory(
    trainer: PreferenceTrainer, when: Callable[[int, int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's forward raises where `when(number of the forward, its tokens)`."""
    forward, sizes = trainer.policy.hidden_states, []

    def bounded(batch: Any) -> torch.Tensor:
        sizes.append(batch.input_ids.numel())
        if when(len(sizes), sizes[-1]):
            raise torch.OutOfMemoryError(f"tried to allocate for {sizes[-1]} tokens")
        return forward(batch)

    monkeypatch.setattr(trainer.policy, "hidden_states", bounded)


@pytest.mark.parametrize(
    ("algorithm", "preference", "micro_batch_tokens", "at"),
    [
        ("dpo", KTO, 10_000, 1),  # scores before it learns
        ("dpo", AOT, 10_000, 1),  # its micro-batches depend on each other
        ("rank", {}, 70, 2),  # the gradient of the first micro-batch is there
    ],
)
def test_a_step_after_out_of_memory_is_that_of_small_micro_batches_from_the_start(
    algorithm, preference, micro_batch_tokens, at, make_run, monkeypatch, caplog
):
    config = make_run(algorithm, preference, micro_batch_tokens=micro_batch_tokens)
    trainer = build_preference_trainer(config)
    run_out_of_memory(trainer, lambda number, _: number == at, monkeypatch)
    with caplog.at_level(logging.WARNING):
        found = trainer.train_step()
    budget = trainer.batches.limit

    ((largest, limit),) = (record.args for record in caplog.records if "micro_batch_tokens" in record.msg)
    assert largest // 2 <= limit == budget < largest
    assert found.timings["memory/micro_batch_tokens"] == budget
    small = build_preference_trainer(config.model_copy(update={"micro_batch_tokens": budget}))
    assert found.metrics == small.train_step().metrics
    for name, parameter in small.policy.trainable().items():
        assert parameter.equal(trainer.policy.trainable()[name]), name
    resumed = build_preference_trainer(config)
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.batches.limit == budget


def test_where_one_prompts_completions_do_not_fit_the_error_names_what_helps(make_run, monkeypatch):
    trainer = build_preference_trainer(make_run("dpo", {}))
    run_out_of_memory(trainer, lambda *_: True, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match=r"one prompt.*gradient_checkpointing.*longest.*lora"):
        trainer.train_step()
    assert not trainer.optimizer.mid_step


def test_held_out_completions_are_scored_in_what_fits(make_run, monkeypatch):
    trainer = build_preference_trainer(make_run("rank", {}))
    expected = trainer.evaluate()
    run_out_of_memory(trainer, lambda _, tokens: tokens > 250, monkeypatch)
    found = trainer.evaluate()
    assert trainer.batches.limit < 1000  # of more
    for one, other in zip(found.groups, expected.groups, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-4, abs=1e-4)


def test_a_resumed_run_is_the_one_that_was_not_stopped(make_run, tmp_path):
    beta = {"schedule": "cosine", "final": 0.5, "gap_gain": 0.6, "min": 0.01, "max": 1.0}
    config = make_run("dpo", {"beta": beta}, checkpoint={"every": 2}, evaluation={})
    run_dir = train(config, display=False).run_dir
    whole = (run_dir / "metrics.jsonl").read_text()
    # The checkpoint of step 2, as a kill after it would leave it.
    (newest,) = (path for path in (run_dir / "checkpoints").iterdir() if "4" in path.name)
    shutil.rmtree(newest)

    train(config, resume="latest", display=False)

    assert (run_dir / "metrics.jsonl").read_text() == whole
    assert len({json.loads(line).get("beta") for line in whole.splitlines()[-4:]}) == 4


def test_a_step_of_groups_that_are_all_ties_changes_nothing_and_held_out_ones_are_refused(make_run):
    config = make_run("rank", {})
    group = [{"response": "w3", "rank": 1}, {"response": "w4", "rank": 1}]
    rows = [json.dumps({"prompt": f"w{2 + i}" + " w5" * 6, "group": group}) + "\n" for i in range(8)]
    Path(config.dataset.source).write_text("".join(rows))
    trainer = build_preference_trainer(config)
    before = {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}

    metrics = trainer.train_step().metrics

    assert metrics["update/skipped"] == 1.0 and metrics["ranking/flat_groups"] == 1.0
    assert all(p.equal(before[name]) for name, p in trainer.policy.trainable().items())
    Path(config.evaluation.dataset.source).write_text(rows[0])
    with pytest.raises(ValueError, match="there is no order to agree with"):
        build_preference_trainer(config)
