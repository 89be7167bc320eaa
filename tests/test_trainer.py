from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast import update as update_module
from grpo_fast.experience import make_samples
from grpo_fast.objective import StepTotals
from grpo_fast.objective.metrics import sum_metrics
from grpo_fast.policy import Sample
from grpo_fast.run_record.logs import Clock
from grpo_fast.trainer import Trainer
from grpo_fast.update import Minibatch


def collected(trainer: Trainer) -> tuple[list[Sample], StepTotals]:
    """One batch's samples, and the counts that their loss is divided by."""
    groups, _ = trainer.collect(Clock())
    return make_samples(groups, trainer.config.advantage)


def minibatch_of(trainer: Trainer, samples: Any, totals: Any) -> Minibatch:
    """One optimiser step's samples, ready for its backward."""
    return trainer.update.with_fixed_logprobs(trainer.update.minibatch(samples, totals))


def gradients(trainer: Trainer, samples: Any, totals: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of one optimiser step, without taking it."""
    _, shares = trainer.update.backward(minibatch_of(trainer, samples, totals), trainer.update.loss_config())
    loss = sum(share["loss"].item() for share in shares)
    return loss, {
        name: p.grad.clone() for name, p in trainer.policy.trainable().items() if p.grad is not None
    }


def test_training_raises_the_reward(make_trainer):
    trainer = make_trainer(max_steps=30, seed=torch.seed() % 2**31)
    rewards = [trainer.train_step().metrics["reward/mean"] for _ in range(30)]
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:5]) / 5


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_micro_batching_changes_neither_loss_nor_gradient(make_trainer, loss_type, beta):
    trainer = make_trainer(loss={"loss_type": loss_type, "beta": beta}, seed=torch.seed() % 2**31)
    trainer.train_step()  # off the reference, so that the KL term has a gradient
    samples, totals = collected(trainer)
    results = []
    for budget in (16, 64, 4096):
        trainer.update.configure(trainer.config.model_copy(update={"micro_batch_tokens": budget}))
        results.append(
            (len(minibatch_of(trainer, samples, totals).batches), *gradients(trainer, samples, totals))
        )
    counts, losses, grads = zip(*results, strict=True)
    assert counts[0] > counts[1] > counts[2] == 1
    for loss, grad in zip(losses[:2], grads[:2], strict=True):
        assert loss == pytest.approx(losses[2], abs=1e-6)
        for name, expected in grads[2].items():
            torch.testing.assert_close(grad[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
def test_a_trained_head_adds_its_own_gradient_in_every_micro_batch(make_trainer, monkeypatch, lora):
    trainer = make_trainer(model={"lora": lora}, seed=torch.seed() % 2**31)
    head, given = trainer.policy.head, []
    linear_grpo_loss = update_module.linear_grpo_loss

    def watched(*args: Any, weight_grad: torch.Tensor | None, **options: Any) -> Any:
        given.append(weight_grad)
        return linear_grpo_loss(*args, weight_grad=weight_grad, **options)

    monkeypatch.setattr(update_module, "linear_grpo_loss", watched)
    samples, totals = collected(trainer)
    minibatch = minibatch_of(trainer, samples, totals)
    trainer.update.backward(minibatch, trainer.update.loss_config())

    assert len(given) == len(minibatch.batches) > 1
    assert all(into is head.weight.grad for into in given)  # None with adapters
    assert (head.weight.grad is None) == (lora is not None)


def test_skipping_groups_without_spread_changes_no_gradient(make_trainer):
    trainer = make_trainer(seed=torch.seed() % 2**31)
    groups, _ = trainer.collect(Clock())
    flat = [
        replace(g, flat=True, advantages=(0.0,) * len(g.advantages)) if i % 2 else g
        for i, g in enumerate(groups)
    ]
    config = trainer.config.advantage
    skipped, totals = make_samples(flat, config)
    kept, same_totals = make_samples(flat, config.model_copy(update={"skip_flat_groups": False}))
    assert len(skipped) < len(kept) and totals == same_totals
    loss, grads = gradients(trainer, skipped, totals)
    full_loss, full_grads = gradients(trainer, kept, totals)
    assert loss == pytest.approx(full_loss, abs=1e-6)
    for name, expected in full_grads.items():
        torch.testing.assert_close(grads[name], expected, rtol=1e-4, atol=1e-6)


def test_metrics_are_means_over_the_tokens_that_were_computed(make_trainer):
    trainer = make_trainer(seed=torch.seed() % 2**31)
    groups, _ = trainer.collect(Clock())
    flat = [replace(group, flat=i % 2 == 1) for i, group in enumerate(groups)]
    samples, totals = make_samples(flat, trainer.config.advantage)
    whole = minibatch_of(trainer, samples, totals).batches
    entropy = torch.cat(
        [trainer.update.head_outputs(trainer.policy, b, "entropy").entropy for b in whole]
    ).mean()
    metrics = trainer.update.run(samples, totals, Clock())
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy.item(), rel=1e-4)


def test_truncated_completions_leave_the_loss_on_request(make_trainer):
    trainer = make_trainer(advantage={"mask_truncated": True}, rollout={"max_completion_length": 3})
    groups, _ = trainer.collect(Clock())
    samples, totals = make_samples(groups, trainer.config.advantage)
    finished = [c for g in groups for c in g.completions if not c.truncated]
    assert totals.num_tokens == sum(len(c.token_ids) for c in finished)
    assert all(1 in sample.completion_ids for sample in samples)


def test_dynamic_sampling_draws_until_the_batch_is_full_of_groups_with_spread(make_trainer, tmp_path: Path):
    (tmp_path / "coin.py").write_text(
        "def coin(completions, **columns):\n    return [float(hash(text) % 2) for text in completions]\n"
    )
    trainer = make_trainer(
        prompts_per_step=16,
        rewards=[{"reward": f"{tmp_path / 'coin.py'}:coin"}],
        rollout={"num_generations": 2},
        advantage={"dynamic_sampling": True, "max_draws": 10},
    )
    groups, metrics = trainer.collect(Clock())
    assert len(groups) == 16 and not any(group.flat for group in groups)
    assert metrics["groups/drawn"] > 16 and metrics["groups/missing"] == 0


def test_dynamic_sampling_gives_up_after_its_bound_and_says_how_many_are_missing(
    make_trainer, tmp_path: Path
):
    (tmp_path / "never.py").write_text(
        "def never(completions, **columns):\n    return [0.0] * len(completions)\n"
    )
    trainer = make_trainer(
        rewards=[{"reward": f"{tmp_path / 'never.py'}:never"}],
        advantage={"dynamic_sampling": True, "max_draws": 2},
    )
    before = {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}
    result = trainer.train_step()
    assert result.metrics["groups/missing"] == trainer.config.prompts_per_step
    assert result.metrics["update/skipped"] == 1
    for name, parameter in trainer.policy.trainable().items():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)


def test_an_on_policy_step_runs_no_forward_for_old_logprobs_and_its_ratio_is_one(make_trainer):
    trainer = make_trainer()
    samples, totals = collected(trainer)
    assert all(b.old_logprobs is None for b in minibatch_of(trainer, samples, totals).batches)
    metrics = trainer.update.run(samples, totals, Clock())
    assert metrics["clip_ratio/region_mean"] == 0
    assert metrics["sampling/logp_difference_mean"] < 1e-4


def count_forwards(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows by one for each forward of the policy; true where it is for a gradient."""
    forward, calls = trainer.policy.hidden_states, []

    def counted(batch: Any) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return forward(batch)

    monkeypatch.setattr(trainer.policy, "hidden_states", counted)
    return calls


@pytest.mark.parametrize(
    ("old_logprobs", "minibatches", "extra"),
    [("recompute", 1, 0), ("recompute", 2, 1), ("sampler", 2, 0)],
)
def test_old_logprobs_cost_a_forward_only_for_minibatches_whose_turn_comes_after_an_update(
    make_trainer, monkeypatch, old_logprobs: str, minibatches: int, extra: int
):
    trainer = make_trainer(
        num_iterations=2, minibatches=minibatches, old_logprobs=old_logprobs, micro_batch_tokens=4096
    )
    calls = count_forwards(trainer, monkeypatch)
    trainer.train_step()
    assert calls.count(True) == 2 * minibatches and calls.count(False) == extra


def test_old_logprobs_of_later_epochs_are_those_of_the_policy_that_sampled(make_trainer):
    trainer = make_trainer(num_iterations=2, seed=torch.seed() % 2**31)
    minibatch = minibatch_of(trainer, *collected(trainer))
    with torch.no_grad():
        expected = [trainer.update.head_outputs(trainer.policy, batch).logprob for batch in minibatch.batches]
    config, update = trainer.update.loss_config(), trainer.update
    updated, shares = update.backward(minibatch, config)
    update.step(shares, config)
    again, _ = update.backward(updated, config)
    for before, after, later in zip(expected, updated.batches, again.batches, strict=True):
        torch.testing.assert_close(after.old_logprobs, before, rtol=0, atol=1e-6)
        assert later.old_logprobs is after.old_logprobs


def test_the_samplers_logprobs_as_old_ones_put_its_error_into_the_ratio(make_trainer):
    trainer = make_trainer(old_logprobs="sampler", seed=torch.seed() % 2**31)
    samples, totals = collected(trainer)
    off = [
        replace(sample, sampler_logprobs=tuple(value - 0.5 for value in sample.sampler_logprobs))
        for sample in samples
    ]
    for given, ratio in ((samples, 1.0), (off, math.exp(0.5))):
        _, (*shares,) = trainer.update.backward(
            minibatch_of(trainer, given, totals), trainer.update.loss_config()
        )
        metrics = sum_metrics(shares)
        assert metrics["policy/ratio_max"] == pytest.approx(ratio, rel=1e-3)
        assert metrics["clip_ratio/region_mean"] == pytest.approx(0.0) or ratio > 1.2
    assert metrics["clip_ratio/high_mean"] > 0


def test_an_on_policy_step_takes_the_truncated_ratio_to_the_sampler_without_a_forward(
    make_trainer, monkeypatch
):
    loss = {"sampler_correction": "token_truncate", "sampler_clip_max": 1.25}
    trainer = make_trainer(loss=loss, seed=torch.seed() % 2**31, micro_batch_tokens=4096)
    samples, totals = collected(trainer)
    expected = {}
    for shift, weight in ((0.0, 1.0), (-0.1, math.exp(0.1)), (-1.0, 1.25)):
        shifted = [
            replace(sample, sampler_logprobs=tuple(value + shift for value in sample.sampler_logprobs))
            for sample in samples
        ]
        calls = count_forwards(trainer, monkeypatch)
        _, grads = gradients(trainer, shifted, totals)
        assert calls == [True]
        expected = expected or grads
        for name, grad in grads.items():
            torch.testing.assert_close(grad, weight * expected[name], rtol=1e-3, atol=1e-5)


def test_sampler_logprobs_as_old_ones_leave_nothing_to_correct(make_trainer):
    with pytest.raises(ValueError, match="sampler_correction = 'token_truncate'"):
        make_trainer(old_logprobs="sampler", loss={"sampler_correction": "token_truncate"})


def test_further_iterations_are_off_policy_and_clip_against_the_first(make_trainer):
    trainer = make_trainer(num_iterations=3, minibatches=2, optimizer={"learning_rate": 2e-2})
    metrics = trainer.train_step().metrics
    assert metrics["clip_ratio/region_mean"] > 0


def test_lora_trains_the_adapters_only_and_needs_no_second_model_for_the_kl(make_trainer):
    trainer = make_trainer(model={"lora": {"r": 4}}, loss={"beta": 0.1}, optimizer={"learning_rate": 1e-2})
    names = set(trainer.policy.trainable())
    assert names and all("lora_" in name for name in names)
    first, second = trainer.train_step().metrics, trainer.train_step().metrics
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 1e-6


def test_adaptive_entropy_raises_its_coefficient_while_the_entropy_is_below_its_target(make_trainer):
    loss = {"use_adaptive_entropy": True, "entropy_target": 100.0, "entropy_coef_delta": 0.01}
    trainer = make_trainer(loss=loss)
    coefficients = [trainer.train_step().metrics["entropy_coef"] for _ in range(3)]
    assert coefficients == pytest.approx([0.0, 0.01, 0.02])


def test_a_kl_in_the_reward_takes_each_completions_sum_from_its_reward(make_trainer):
    trainer = make_trainer(
        loss={"beta": 0.5, "kl_in_reward": True},
        optimizer={"learning_rate": 1e-2},
        seed=torch.seed() % 2**31,
    )
    before = make_trainer(seed=trainer.config.seed)  # the same weights, untrained: the reference
    trainer.train_step()
    groups, _ = trainer.collect(Clock())
    for group in groups:
        for completion, reward, parts in zip(
            group.completions, group.rewards, group.reward_table, strict=True
        ):
            ids = torch.tensor([group.prompt.token_ids + completion.token_ids])
            start = len(group.prompt.token_ids)
            now, then = (
                t.policy.model(ids)
                .logits[0, start - 1 : -1]
                .log_softmax(-1)
                .gather(1, ids[0, start:, None])
                .sum()
                for t in (trainer, before)
            )
            assert reward.item() == pytest.approx((parts.sum() - 0.5 * (now - then)).item(), abs=1e-4)


ADVANTAGES = """
def last_token(groups, rewards):
    centred = rewards - rewards.mean(1, keepdim=True)
    return [
        [[0.0] * (len(c.token_ids) - 1) + [a] for c, a in zip(group.completions, row)]
        for group, row in zip(groups, centred.tolist())
    ]

def one_too_few(groups, rewards):
    return [row[:-1] for row in rewards.tolist()]
"""


def test_a_users_function_gives_each_token_its_advantage(make_trainer, tmp_path: Path, monkeypatch):
    (tmp_path / "own_advantages.py").write_text(ADVANTAGES)
    monkeypatch.syspath_prepend(tmp_path)
    trainer = make_trainer(advantage={"function": "own_advantages:last_token"})
    groups, _ = trainer.collect(Clock())
    samples, _ = make_samples(groups, trainer.config.advantage)
    expected = torch.cat([group.rewards - group.rewards.mean() for group in groups if not group.flat])
    torch.testing.assert_close(torch.tensor([s.token_advantages[-1] for s in samples]), expected)
    assert not any(any(s.token_advantages[:-1]) for s in samples)


def test_an_advantage_function_of_the_wrong_shape_is_named(make_trainer, tmp_path: Path, monkeypatch):
    (tmp_path / "short_advantages.py").write_text(ADVANTAGES)
    monkeypatch.syspath_prepend(tmp_path)
    trainer = make_trainer(advantage={"function": "short_advantages:one_too_few"})
    with pytest.raises(ValueError, match="one_too_few"):
        trainer.collect(Clock())


def test_the_length_limit_follows_the_completions_and_a_resumed_trainer_goes_on_with_it(make_trainer):
    rollout = {"max_completion_length": 2, "adaptive_length": {"min": 1, "max": 6, "window": 1}}
    trainer = make_trainer(rollout=rollout)
    limits = [trainer.train_step().metrics["completion/length_limit"] for _ in range(5)]
    assert limits == [2, 3, 5, 6, 6]  # a random model hardly ever ends early
    assert max(len(c.token_ids) for group in trainer.collect(Clock())[0] for c in group.completions) == 6
    assert trainer.evaluation_sampling.max_completion_length == 6

    resumed = make_trainer(rollout=rollout)
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.length.limit == 6


def test_rewards_begun_while_others_decode_change_no_step(toy, make_trainer):
    seed = torch.seed() % 2**31
    metrics = [
        make_trainer(seed=seed, rewards=[{**toy["rewards"][0], "per_group": early}]).train_step().metrics
        for early in (False, True)
    ]
    assert metrics[0] == metrics[1]


def test_a_generation_tells_how_far_it_is(make_trainer):
    trainer = make_trainer()
    seen: list[tuple[int, int, int]] = []
    trainer.on_progress = lambda *numbers: seen.append(numbers)
    groups, _ = trainer.collect(Clock())
    total = sum(len(group.completions) for group in groups)
    assert seen[0] == (0, 0, total) and seen[-1][1:] == (total, total)
    assert seen[-1][0] == sum(len(c.token_ids) for group in groups for c in group.completions)
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(seen))
    seen.clear()
    trainer.evaluate(3)
    assert seen[-1][1:] == (3, 3)
