"""Training on fixed completions: gradients whatever the micro-batches, learning, resuming."""

from __future__ import annotations

import json
import logging
import re
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from grpo_fast.loop.annotate import Annotator
from grpo_fast.objective import PairScores
from grpo_fast.preference.comparison import summed_logprobs
from grpo_fast.preference.trainer import PreferenceTrainer
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import Clock
from grpo_fast.run import train
from grpo_fast.run.build import build_preference_trainer, build_trainer

KTO = {"loss": {"loss_type": "kto"}}


def quality_first(scores: PairScores) -> torch.Tensor:
    """The better a row's `quality`, the further ahead its chosen completion is already."""
    return -logsigmoid(scores.beta * (scores.chosen - scores.rejected) + scores.columns["quality"])


def gradients(trainer: PreferenceTrainer, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, dict[str, float]]:
    """Of a step on fixed comparisons, and its metrics; no weight moves."""
    monkeypatch.setattr(trainer.optimizer, "step", lambda: 0.0)
    trainer.drawn = [*range(8)]
    metrics = trainer.learn(trainer.comparisons.select_groups(trainer.drawn), Clock())
    return {name: p.grad.clone() for name, p in trainer.policy.trainable().items()}, metrics


@pytest.mark.parametrize(
    ("algorithm", "preference"),
    [
        ("dpo", {"loss": {"loss_type": ["sigmoid", "sft"]}}),
        ("dpo", {"loss": {"loss_type": "simpo"}}),
        ("dpo", {"loss": {"loss_type": f"{__name__}:quality_first", "columns": ["quality"]}}),
        ("dpo", KTO),
        ("rank", {"ranking": {"objective": "plackett_luce"}}),
        ("rank", {"ranking": {"objective": "advantage"}}),
    ],
)
def test_micro_batches_and_the_heads_gradient_in_place_change_nothing(
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


def test_training_by_kto_lifts_the_held_out_score(make_run):
    config = make_run("dpo", KTO, max_steps=12, size=96, optimizer={"learning_rate": 8e-3})
    run_dir = train(config, display=False).run_dir
    before, after = read_jsonl(run_dir / "evaluations.jsonl")
    assert after["score"] > max(0.85, before["score"] + 0.2)  # chance is a half
    steps = read_jsonl(run_dir / "metrics.jsonl")
    assert steps[-1]["rewards/margins"] > steps[1]["rewards/margins"]
    assert {"eval/ranking/sum/kendall_tau", "eval/ranking/mean/top1_accuracy"} <= steps[-1].keys()


@pytest.mark.parametrize(
    ("algorithm", "preference", "micro_batch_tokens", "at"),
    [
        ("dpo", KTO, 10_000, 1),  # scores before it learns
        ("rank", {}, 70, 2),  # the gradient of the first micro-batch is there
    ],
)
def test_a_step_after_out_of_memory_equals_one_of_small_micro_batches(
    algorithm, preference, micro_batch_tokens, at, make_run, monkeypatch, caplog
):
    config = make_run(algorithm, preference, micro_batch_tokens=micro_batch_tokens)
    trainer = build_preference_trainer(config)
    forward, forwards = trainer.policy.hidden_states, count(1)

    def bounded(batch: Any, **options: Any) -> torch.Tensor:
        if next(forwards) == at:
            raise torch.OutOfMemoryError("tried to allocate")
        return forward(batch, **options)

    monkeypatch.setattr(trainer.policy, "hidden_states", bounded)
    with caplog.at_level(logging.WARNING):
        found = trainer.train_step()
    budget = trainer.annotator.budget.limit

    (found_sizes,) = re.findall(r"of (\d+) tokens: .* micro_batch_tokens = (\d+)", caplog.text)
    largest, limit = map(int, found_sizes)
    assert largest // 2 <= limit == budget < largest
    assert found.timings["memory/micro_batch_tokens"] == budget
    small = build_preference_trainer(config.model_copy(update={"micro_batch_tokens": budget}))
    assert found.metrics == small.train_step().metrics
    for name, parameter in small.policy.trainable().items():
        assert parameter.equal(trainer.policy.trainable()[name]), name
    resumed = build_preference_trainer(config)
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.annotator.budget.limit == budget


@pytest.mark.parametrize(
    "beta", [{"schedule": "cosine", "final": 0.5}, {"band": {"below": 9.0, "above": 9.0}}]
)
def test_a_resumed_run_is_the_one_that_was_not_stopped(beta, make_run, tmp_path):
    beta = beta | {"min": 0.01, "max": 1.0}
    band = {"metric": "rewards/margins", "below": 9.0, "above": 9.0, "min": 0.5, "max": 2.0}
    optimizer = {"learning_rate": 1e-3, "band": band}
    config = make_run("dpo", {"beta": beta}, checkpoint={"every": 2}, evaluation={}, optimizer=optimizer)
    run_dir = train(config, display=False).run_dir
    whole = (run_dir / "metrics.jsonl").read_text()
    # The checkpoint of step 2, as a kill after it would leave it.
    (newest,) = (path for path in (run_dir / "checkpoints").iterdir() if "4" in path.name)
    shutil.rmtree(newest)

    train(config, resume="latest", display=False)

    assert (run_dir / "metrics.jsonl").read_text() == whole
    steps = read_jsonl(run_dir / "metrics.jsonl")[-4:]
    assert len({step["beta"] for step in steps}) == 4
    assert [step["learning_rate/factor"] for step in steps] == pytest.approx([1.1**n for n in range(4)])


@pytest.mark.parametrize(
    ("loss", "metric", "said"),
    [
        (
            {},
            "rewards/margin",
            "optimizer.band.metric = 'rewards/margin' is no metric of an update: .*'rewards/margins'",
        ),
        ({"loss_type": f"{__name__}:absent"}, "loss", "preference.loss.loss_type = .*absent"),
        (
            {"loss_type": f"{__name__}:quality_first", "columns": ["qualty"]},
            "loss",
            "row 0: preference.loss.columns: qualty = None .*'quality'",
        ),
    ],
)
def test_what_a_loss_or_a_band_lacks_is_named_before_weights_load(loss, metric, said, make_run, monkeypatch):
    monkeypatch.setattr("grpo_fast.run.build.load_policy", None)
    band = {"metric": metric, "below": 0.1, "above": 0.5, "min": 0.5, "max": 2.0}
    with pytest.raises(ValueError, match=said):
        build_trainer(make_run("dpo", {"loss": loss}, optimizer={"band": band}))


def test_groups_of_ties_change_nothing_and_held_out_ones_are_refused(make_run):
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


# --------------------------------------------------------------------- log-probabilities of completions


def test_completions_are_scored_in_order_as_the_model_scores_each_alone(make_run):
    trainer = build_preference_trainer(make_run("rank", {}))
    table = trainer.comparisons.select_groups(range(8))

    annotator = Annotator(trainer.policy, micro_batch_tokens=70, whole_groups=True)
    scores = table.sums(annotator.columns(table)[0])

    assert len(annotator.packed(table)) > 1
    for row, value in enumerate(scores):
        prompt, tokens = table.prompt_of(row), table.tokens_of(row)
        logits = trainer.policy.model(torch.cat([prompt, tokens])[None]).logits[0]
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        torch.testing.assert_close(value, logprobs.gather(1, tokens[:, None]).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("loss_type", "needs"), [("simpo", False), ("kto", True)])
def test_the_reference_is_the_untrained_policy_where_one_is_needed(make_run, loss_type: str, needs: bool):
    trainer = build_preference_trainer(make_run("dpo", {"loss": {"loss_type": loss_type}}))
    for table in (trainer.comparisons, trainer.mismatched) if needs else ():
        assert torch.equal(table.facts["ref_logprob"], summed_logprobs(table, trainer.annotator))
    assert ("ref_logprob" in trainer.comparisons.facts) == needs
