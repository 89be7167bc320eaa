"""Training on fixed completions: gradients whatever the micro-batches, learning, resuming."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.preference.trainer import PreferenceTrainer
from grpo_fast.run import build_preference_trainer, train
from grpo_fast.run_record.logs import Clock

LOSSES = ["sigmoid", "ipo", "simpo", "orpo", "cpo", "kto", "aot", "aot_unpaired", ["sigmoid", "sft"]]
OBJECTIVES = ["plackett_luce", "pairwise", "advantage", "advantage_likelihood"]


def one_step(config: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The weights after a step on fixed comparisons, and its metrics."""
    torch.manual_seed(0)
    trainer = build_preference_trainer(config)
    with torch.no_grad():  # away from the reference, where some losses have no curvature to show
        for parameter in trainer.policy.trainable().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    metrics = trainer.update(list(trainer.comparisons.values())[:8], Clock())
    return {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}, metrics


@pytest.mark.parametrize(
    ("algorithm", "preference"),
    [("dpo", {"loss": {"loss_type": name}}) for name in LOSSES]
    + [("rank", {"ranking": {"objective": name}}) for name in OBJECTIVES],
    ids=lambda value: str(next(iter(value.values()))) if isinstance(value, dict) else value,
)
def test_micro_batches_change_nothing(algorithm, preference, make_run):
    plain_descent = {"learning_rate": 1e-2, "eps": 1.0, "max_grad_norm": None}
    config = make_run(algorithm, preference, optimizer=plain_descent)

    whole, metrics = one_step(config)
    split, split_metrics = one_step(config.model_copy(update={"micro_batch_tokens": 25}))

    for name, weight in whole.items():
        torch.testing.assert_close(split[name], weight, rtol=1e-5, atol=1e-6)
    assert metrics.keys() == split_metrics.keys()
    for name, value in metrics.items():
        assert split_metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("micro_batch_tokens", [25, 10_000])
def test_the_heads_gradient_added_in_place_is_that_of_autograd(make_run, monkeypatch, micro_batch_tokens):
    trainer = build_preference_trainer(make_run("rank", {}, micro_batch_tokens=micro_batch_tokens))
    comparisons = list(trainer.comparisons.values())[:8]
    monkeypatch.setattr(trainer.optimizer, "step", lambda: 0.0)  # the gradients stay

    def gradients() -> dict[str, torch.Tensor]:
        trainer.update(comparisons, Clock())
        return {name: p.grad.clone() for name, p in trainer.policy.trainable().items()}

    found = gradients()
    monkeypatch.setattr(trainer.optimizer, "gradient_of", lambda parameter: None)
    for name, gradient in gradients().items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize(
    ("algorithm", "preference", "metric"),
    [
        ("dpo", {"loss": {"loss_type": "sigmoid"}}, "rewards/margins"),
        ("dpo", {"loss": {"loss_type": "simpo"}}, "rewards/margins"),
        ("dpo", {"loss": {"loss_type": "kto"}}, "rewards/margins"),
        ("rank", {"ranking": {"objective": "plackett_luce"}}, "ranking/pairwise_accuracy"),
        ("rank", {"ranking": {"objective": "advantage_likelihood"}}, "ranking/pairwise_accuracy"),
    ],
    ids=["dpo", "simpo", "kto", "plackett-luce", "weighted likelihood"],
)
def test_training_lifts_the_held_out_score(algorithm, preference, metric, make_run):
    config = make_run(algorithm, preference, max_steps=25, size=120, optimizer={"learning_rate": 3e-3})
    run_dir = train(config, display=False)
    lines = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["held-out", "held-out"]
    print(f"{lines[0]['score']:.3f} -> {lines[1]['score']:.3f}")
    # Chance is a half.
    assert lines[1]["score"] > max(0.85, lines[0]["score"] + 0.2)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1][metric] > steps[1][metric]
    assert {"eval/ranking/sum/kendall_tau", "eval/ranking/mean/top1_accuracy"} <= steps[-1].keys()
    assert (run_dir / "report.html").exists()


def limit_memory(trainer: PreferenceTrainer, share: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The policy's forward raises above this share of its first batch; returns the sizes that it refused."""
    forward, refused = trainer.policy.hidden_states, []

    def bounded(batch: Any) -> torch.Tensor:
        if not refused or batch.input_ids.numel() > share * refused[0]:
            refused.append(batch.input_ids.numel())
            raise torch.OutOfMemoryError(f"tried to allocate for {batch.input_ids.numel()} tokens")
        return forward(batch)

    monkeypatch.setattr(trainer.policy, "hidden_states", bounded)
    return refused


@pytest.mark.parametrize(
    ("algorithm", "preference"),
    [
        ("dpo", {"loss": {"loss_type": "sigmoid"}}),
        ("dpo", {"loss": {"loss_type": "kto"}}),  # scores before it learns
        ("dpo", {"loss": {"loss_type": "aot"}}),  # its micro-batches depend on each other
        ("rank", {}),
    ],
    ids=["dpo", "kto", "aot", "rank"],
)
def test_a_step_after_out_of_memory_is_that_of_small_micro_batches_from_the_start(
    algorithm, preference, make_run, monkeypatch, caplog
):
    config = make_run(algorithm, preference)
    trainer = build_preference_trainer(config)
    refused = limit_memory(trainer, 0.6, monkeypatch)  # of eight; the longest takes less
    with caplog.at_level(logging.WARNING):
        found = trainer.train_step()
    budget = trainer.batches.limit

    assert refused and budget is not None
    assert f"micro_batch_tokens = {budget}" in caplog.text
    assert found.timings["memory/micro_batch_tokens"] == budget
    small = build_preference_trainer(config.model_copy(update={"micro_batch_tokens": budget}))
    assert found.metrics == small.train_step().metrics
    for name, parameter in small.policy.trainable().items():
        assert parameter.equal(trainer.policy.trainable()[name]), name
    resumed = build_preference_trainer(config)
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.batches.limit == budget


def test_what_a_failed_backward_has_added_to_gradients_is_forgotten(make_run, monkeypatch):
    config = make_run("rank", {})
    trainer = build_preference_trainer(config)
    backward, calls = trainer.backward, []

    def full(comparisons: Any, constants: Any) -> Any:
        result = backward(comparisons, constants)
        calls.append(len(comparisons))
        if len(calls) == 1:  # its gradient is there
            raise torch.OutOfMemoryError("no room")
        return result

    monkeypatch.setattr(trainer, "backward", full)
    metrics = trainer.train_step().metrics

    small = build_preference_trainer(config.model_copy(update={"micro_batch_tokens": trainer.batches.limit}))
    assert len(calls) > 2 and metrics == small.train_step().metrics


def test_where_one_prompts_completions_do_not_fit_the_error_names_what_helps(make_run, monkeypatch):
    trainer = build_preference_trainer(make_run("dpo", {}))
    limit_memory(trainer, 0.0, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match=r"one prompt.*gradient_checkpointing.*longest.*lora"):
        trainer.train_step()
    assert not trainer.optimizer.mid_step


def test_held_out_completions_are_scored_in_what_fits(make_run, monkeypatch):
    trainer = build_preference_trainer(make_run("rank", {}))
    expected = trainer.evaluate()
    refused = limit_memory(trainer, 0.1, monkeypatch)  # of eighty groups
    found = trainer.evaluate()
    assert refused and trainer.batches.limit < refused[0] / 4
    for one, other in zip(found.groups, expected.groups, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-4, abs=1e-4)


def test_a_resumed_run_is_the_one_that_was_not_stopped(make_run, tmp_path):
    beta = {"schedule": "cosine", "final": 0.5, "gap_gain": 0.6, "min": 0.01, "max": 1.0}
    config = make_run("dpo", {"beta": beta}, max_steps=6, checkpoint={"every": 3})

    def in_folder(name: str, **changes: Any) -> Any:
        return config.model_copy(update={"output_dir": str(tmp_path / name), **changes})

    train(in_folder("whole"), display=False)
    # The checkpoint of step 3, as a kill after it would leave it.
    stopped = train(in_folder("stopped"), display=False)
    (newest,) = [path for path in (stopped / "checkpoints").iterdir() if "6" in path.name]
    for path in sorted(newest.rglob("*"), reverse=True):
        path.unlink()
    newest.rmdir()
    train(in_folder("stopped"), resume="latest", display=False)

    whole, resumed = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "stopped"))
    assert whole == resumed
    assert len({json.loads(line).get("beta") for line in whole.splitlines()[1:]}) == 6


def test_a_step_of_groups_that_are_all_ties_changes_nothing(make_run, tmp_path):
    config = make_run("rank", {}, evaluation={})
    group = [{"response": "w3", "rank": 1}, {"response": "w4", "rank": 1}]
    rows = [{"prompt": f"w{2 + i} w5", "group": group} for i in range(8)]
    Path(config.dataset.source).write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = build_preference_trainer(config)
    before = {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}
    metrics = trainer.train_step().metrics
    assert metrics["update/skipped"] == 1.0 and metrics["ranking/flat_groups"] == 1.0
    assert all(p.equal(before[name]) for name, p in trainer.policy.trainable().items())


def test_held_out_groups_without_any_order_are_refused(make_run, tmp_path):
    config = make_run("rank", {})
    row = {"prompt": "w2 w2", "group": [{"response": "w3", "rank": 1}, {"response": "w4", "rank": 1}]}
    (tmp_path / "held_out.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="there is no order to agree with"):
        build_preference_trainer(config)
