"""The training loop: sampling, rewards, penalties, dynamic sampling, samples."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.loop.collect import to_train
from grpo_fast.record.logs import Clock
from grpo_fast.record.summary import metric_of
from grpo_fast.rollout import batch
from grpo_fast.rollout.transformers import TransformersEngine

OWN = """
calls = 0

def half_flat_at_first(completions, **columns):
    global calls
    calls += 1
    return [float(i % (4 if calls == 1 else 2) == 1) for i in range(len(completions))]

def never(completions, **columns):
    return [0.0] * len(completions)

def last_token(groups, rewards):
    centred = rewards - rewards.mean(1, keepdim=True)
    return [
        [[0.0] * (len(c.token_ids) - 1) + [a] for c, a in zip(group.completions, row)]
        for group, row in zip(groups, centred.tolist())
    ]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The import path of one of a user's functions."""
    (tmp_path / "functions_of_a_user.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "functions_of_a_user", raising=False)
    return "functions_of_a_user:{}".format


def test_training_raises_the_reward(make_trainer, seed):
    trainer = make_trainer(max_steps=12, seed=seed, optimizer={"learning_rate": 2e-2})
    rewards = [trainer.train_step().metrics["reward/mean"] for _ in range(12)]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])


@pytest.mark.parametrize(
    "sections",
    [
        {
            "advantage": {"dynamic_sampling": True},
            "loss": {"beta": 0.1, "epsilon_low": 0.1},
            "num_iterations": 2,
        },
        {"loss": {"loss_type": "clip_cov", "use_adaptive_entropy": True}},
        {
            "curriculum": {},
            "loss": {"loss_type": "kl_cov"},
            "adaptive_weights": {"targets": {"near_w7": 1.0}},
        },
        {
            "groups": {"strategy": "adaptive", "phases": [{"until": 1.0, "strategy": "performance"}]},
            "loss": {"loss_type": "gmpo", "sampler_correction": "token_truncate"},
        },
    ],
    ids=str,
)
def test_every_metric_that_a_step_writes_has_a_meaning(make_trainer, sections):
    step = make_trainer(**sections).train_step()
    assert [name for name in {**step.metrics, **step.timings} if metric_of(name) is None] == []


def test_the_parts_of_a_reward_add_up_to_it_under_their_own_names(make_trainer):
    trainer = make_trainer(
        rewards=[
            {"reward": "length", "weight": 0.5, "options": {"target": 2}},
            {"reward": "soft_overlong", "weight": 0.25, "options": {"max_length": 3, "cache": 3}},
        ],
        adaptive_weights={"targets": {"length": 5.0}, "rate": 1.0},
        loss={"beta": 0.5, "kl_in_reward": True},
        advantage={"soft_overlong": 0.75},
        optimizer={"learning_rate": 2e-2},
        logging={"samples": 100},
    )
    for _ in range(2):
        step = trainer.train_step()
    parts = ["length", "soft_overlong", "soft_overlong_2", "kl"]
    weights = step.samples[0].weights
    assert [*weights] == parts and weights["length"] != 0.5 and weights["kl"] == 1.0
    for sample in step.samples:
        assert sample.weights == weights and [*sample.rewards] == parts
        total = sum(weights[name] * value for name, value in sample.rewards.items())
        assert sample.reward == pytest.approx(total, abs=1e-5)
    means = {name: step.metrics[f"reward/{name}/mean"] for name in parts}
    total = sum(weights[name] * mean for name, mean in means.items())
    assert step.metrics["reward/mean"] == pytest.approx(total, abs=1e-5)
    assert means["kl"] and means["soft_overlong_2"] < 0


@pytest.mark.parametrize(
    "sections", [{}, {"old_logprobs": "sampler"}, {"model": {"dtype": "bfloat16"}}], ids=str
)
def test_first_completions_of_another_policy_are_an_error_before_any_step(
    make_trainer, monkeypatch, sections
):
    """Whose logits stand the other way round."""
    apart = {"value": True}

    def of_others(logits, *arguments):
        return draw(logits.flip(-1) if apart["value"] else logits, *arguments)

    draw = batch.draw
    monkeypatch.setattr(batch, "draw", of_others)
    monkeypatch.setattr(TransformersEngine, "_require_ready", lambda self: None)  # which compares, too
    trainer = make_trainer(**sections)
    trainer.policy.model.lm_head.weight.data *= 20  # peaked enough that another policy is told from rounding
    before = {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}

    with pytest.raises(
        ValueError, match=r"another policy: rollout\.engine = 'transformers' .* nats .*sampler_drift"
    ):
        trainer.train_step()

    assert all(torch.equal(p, before[name]) for name, p in trainer.policy.trainable().items())
    for changes in ({"alerts": {"sampler_drift": None}}, {"rollout": {"top_k": 5}}):
        make_trainer(**{**sections, **changes, "old_logprobs": "recompute"}).train_step()
    apart["value"] = False
    for healthy in (trainer, make_trainer(**sections)):
        healthy.train_step()
        assert healthy.sampler_seen


def test_truncated_completions_leave_the_loss_on_request(make_trainer):
    trainer = make_trainer(advantage={"mask_truncated": True}, rollout={"max_completion_length": 3})
    table, _ = trainer.collect(Clock())
    chosen, totals = to_train(table, trainer.config.advantage, trainer.config.loss)
    assert totals.num_tokens == table.num_targets[~table.facts["truncated"]].sum()
    assert all(1 in chosen.tokens_of(row) for row in range(len(chosen)))


def test_dynamic_sampling_draws_until_the_batch_has_no_flat_group(make_trainer, own):
    trainer = make_trainer(
        prompts_per_step=16,
        rewards=[{"reward": own("half_flat_at_first")}],
        rollout={"num_generations": 2},
        advantage={"dynamic_sampling": True, "max_draws": 10},
    )
    for drawn in (32, 16):
        table, metrics = trainer.collect(Clock())
        assert table.by_group("reward").shape == (16, 2)
        assert not table.facts["flat"].any()
        assert (metrics["groups/drawn"], metrics["groups/missing"]) == (drawn, 0)


def test_dynamic_sampling_stops_at_its_bound_and_reports_missing_groups(make_trainer, own):
    trainer = make_trainer(
        rewards=[{"reward": own("never")}], advantage={"dynamic_sampling": True, "max_draws": 2}
    )
    before = {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}
    metrics = trainer.train_step().metrics
    assert metrics["groups/drawn"] == 2 * trainer.config.prompts_per_step
    assert metrics["groups/missing"] == trainer.config.prompts_per_step
    assert metrics["update/skipped"] == 1
    assert all(torch.equal(p, before[name]) for name, p in trainer.policy.trainable().items())


def test_groups_and_the_curriculum_go_by_rewards_before_any_penalty(make_trainer, own):
    trainer = make_trainer(
        rewards=[{"reward": own("never")}],
        advantage={"dynamic_sampling": True, "max_draws": 2, "soft_overlong": 1.0},
        curriculum={"threshold": 0.0},
    )
    table, metrics = trainer.collect(Clock())
    assert not len(table) and metrics["groups/missing"] == 4 and metrics["reward/mean"] < 0
    _, metrics = trainer.collect(Clock())
    assert metrics["curriculum/pass_rate"] > 0.5  # where it starts


def test_a_kl_in_the_reward_takes_each_completions_sum_from_its_reward(make_trainer, seed):
    loss = {"beta": 0.5, "kl_in_reward": True}
    trainer = make_trainer(loss=loss, optimizer={"learning_rate": 1e-2}, seed=seed)
    before = make_trainer(seed=seed)  # the same weights, untrained: the reference
    trainer.train_step()
    table, _ = trainer.collect(Clock())

    def logprob(trainer, ids: torch.Tensor, start: int) -> torch.Tensor:
        logprobs = trainer.policy.model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        return logprobs.gather(1, ids[0, start:, None]).sum()

    for row in range(len(table)):
        prompt = table.prompt_of(row)
        ids, start = torch.cat([prompt, table.tokens_of(row)])[None], len(prompt)
        kl = logprob(trainer, ids, start) - logprob(before, ids, start)
        expected = table.facts["reward_table"][row].sum() - 0.5 * kl
        assert table.facts["reward"][row].item() == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("function", [True, False])
def test_texts_of_other_ranks_are_sent_where_a_users_function_reads_them(make_trainer, own, function):
    trainer = make_trainer(advantage={"function": own("last_token") if function else None})
    trainer.world = SimpleNamespace(  # the other rank has the same
        rank=0,
        size=2,
        share=lambda prompts: prompts,
        seed=lambda seed: seed,
        gather_tensors=lambda place, work: [work()] * 2,
        gather_from_all=lambda place, work: [work()] * 2,
    )
    table = trainer.rollout(trainer.prompts.next(), 0, Clock())
    theirs = table.objects["completion"][len(table) // 2 :]
    assert len(theirs) == 24 and all((completion is not None) == function for completion in theirs)


def test_rewards_begun_while_others_decode_change_no_step(toy, make_trainer, seed):
    metrics = [
        make_trainer(seed=seed, rewards=[{**toy["rewards"][0], "per_group": early}]).train_step().metrics
        for early in (False, True)
    ]
    assert metrics[0] == metrics[1]


def test_a_generation_tells_how_far_it_is(make_trainer):
    trainer = make_trainer()
    seen: list[tuple[int, int, int]] = []
    trainer.on_progress = lambda *numbers: seen.append(numbers)
    table, _ = trainer.collect(Clock())
    total = len(table)
    assert seen[0] == (0, 0, total) and seen[-1][1:] == (total, total)
    assert seen[-1][0] == len(table.token_ids)
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(seen))
    seen.clear()
    trainer.evaluate(3)
    assert seen[-1][1:] == (3, 3)


def test_samples_are_the_whole_first_group_and_one_of_each_other(make_trainer, seed):
    trainer = make_trainer(seed=seed, logging={"samples": 3})
    table, _ = trainer.collect(Clock())
    samples, completions = trainer.samples(table), table.objects["completion"]
    assert [sample.group for sample in samples] == [0] * 6 + [1, 2]
    assert [sample.completion for sample in samples[:6]] == [c.text for c in completions[:6]]
    assert [sample.advantage for sample in samples[:6]] == table.facts["advantage"][:6].tolist()
    assert samples[6].completion == completions[6].text
    assert samples[6].question == table.objects["prompt"][6].prompt
    assert trainer.train_step().samples[-1].group == 2
