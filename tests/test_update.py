"""Out of memory, a step is done again in smaller micro-batches, and comes out as if it had been all along."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from grpo_fast import update
from grpo_fast.experience import make_samples
from grpo_fast.objective import StepTotals
from grpo_fast.plan.measure import random_batches, random_policy
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer, Sample
from grpo_fast.policy.config import LoraConfig, ModelConfig, OptimizerConfig
from grpo_fast.policy.out_of_memory import Attempt, is_out_of_memory, optimizer_step
from grpo_fast.run_record.logs import Clock
from grpo_fast.trainer import Trainer
from grpo_fast.update import packed_loss

WORK = StepSizes(prompts=3, generations=2, prompt_length=6, completion_length=5, micro_batch_tokens=20)
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def seed() -> int:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return seed


def limit_memory(trainer: Trainer, tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The policy's forward raises above so many tokens; returns the sizes of those that it refused."""
    forward: Callable[..., torch.Tensor] = trainer.policy.hidden_states
    refused: list[int] = []

    def bounded(batch: Any) -> torch.Tensor:
        if batch.input_ids.numel() > tokens:
            refused.append(batch.input_ids.numel())
            raise torch.OutOfMemoryError(f"tried to allocate for {batch.input_ids.numel()} tokens")
        return forward(batch)

    monkeypatch.setattr(trainer.policy, "hidden_states", bounded)
    return refused


def collected(trainer: Trainer) -> tuple[list[Sample], StepTotals]:
    """One batch's samples, and the counts that their loss is divided by."""
    groups, _ = trainer.collect(Clock())
    return make_samples(groups, trainer.config.advantage)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}


def flat_weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([value.flatten() for value in weights(trainer).values()])


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"num_iterations": 2},
        {"loss": {"top_entropy_quantile": 0.5}},
        {"model": {"lora": {"r": 4, "dropout": 0.5}}},
    ],
    ids=["on-policy", "two-epochs", "entropy-quantile", "dropout"],
)
def test_a_step_after_out_of_memory_is_that_of_small_micro_batches_from_the_start(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, seed: int, sections: dict[str, Any]
) -> None:
    trainer = make_trainer(seed=seed, micro_batch_tokens=4096, **sections)
    refused = limit_memory(trainer, 40, monkeypatch)
    found = trainer.train_step()
    budget = trainer.update.budget.limit

    assert refused and budget is not None and budget < min(refused)
    small = make_trainer(seed=seed, micro_batch_tokens=budget, **sections)
    assert found.metrics == small.train_step().metrics
    for name, value in weights(small).items():
        assert torch.equal(weights(trainer)[name], value), name
    assert found.timings["memory/micro_batch_tokens"] == budget


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_failed_backward_has_added_to_gradients_is_forgotten(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, seed: int, dtype: str
) -> None:
    sections = {"seed": seed, "model": {"dtype": dtype}}
    trainer = make_trainer(micro_batch_tokens=4096, **sections)
    forward: Callable[..., torch.Tensor] = trainer.policy.hidden_states
    refused: list[int] = []

    def bounded(batch: Any) -> torch.Tensor:
        hidden, tokens = forward(batch), batch.input_ids.numel()

        def refuse(_: torch.Tensor) -> None:  # the head's backward is over: its gradient has been added
            refused.append(tokens)
            raise torch.OutOfMemoryError(f"tried to allocate for {tokens} tokens")

        if tokens > 40 and hidden.requires_grad:
            hidden.register_hook(refuse)
        return hidden

    monkeypatch.setattr(trainer.policy, "hidden_states", bounded)
    found = trainer.train_step()

    assert refused
    small = make_trainer(micro_batch_tokens=trainer.update.budget.limit, **sections)
    assert found.metrics == small.train_step().metrics
    assert torch.equal(flat_weights(trainer), flat_weights(small))


def test_a_step_of_the_optimiser_that_does_not_fit_says_what_helps(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = make_trainer().optimizer

    def full() -> float:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(optimizer, "step", full)
    with pytest.raises(torch.OutOfMemoryError, match=r"model\.lora.*train_lm_head.*CUDA error"):
        optimizer_step(optimizer)

    def broken() -> float:
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(optimizer, "step", broken)
    with pytest.raises(RuntimeError, match="size mismatch"):
        optimizer_step(optimizer)


def test_only_the_optimiser_step_that_failed_is_repeated(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    sections = {"seed": seed, "num_iterations": 3, "minibatches": 2, "micro_batch_tokens": 4096}
    sections["loss"] = {"beta": 0.1}  # its reference log-probabilities move to the smaller micro-batches
    sections["advantage"] = {"skip_flat_groups": False}  # else few samples might be left
    trainer = make_trainer(**sections)
    steps, loss = [], update.packed_loss
    step = trainer.optimizer.step
    monkeypatch.setattr(trainer.optimizer, "step", lambda: steps.append(True) or step())

    def late(head: Any, hidden: Any, batch: Any, *args: Any, **options: Any) -> Any:
        if len(steps) == 3 and batch.input_ids.numel() > 60:
            raise torch.OutOfMemoryError("later than the first")
        return loss(head, hidden, batch, *args, **options)

    before = flat_weights(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(update, "packed_loss", late)
        metrics = trainer.train_step().metrics

    whole = make_trainer(**sections)
    expected = whole.train_step().metrics
    assert len(steps) == 6 and trainer.update.budget.limit <= 60
    for name in ("kl", "entropy", "grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-2)
    # In the norm: where a gradient is rounding noise, Adam steps by the full rate in either direction.
    distance = (flat_weights(trainer) - flat_weights(whole)).norm()
    assert distance < 1e-2 * (flat_weights(whole) - before).norm()


def test_known_log_probabilities_move_to_the_tokens_they_belong_to(
    make_trainer: Callable[..., Trainer],
) -> None:
    trainer = make_trainer(micro_batch_tokens=4096)
    samples, totals = collected(trainer)
    minibatch = trainer.update.minibatch(samples, totals)
    codes = [1000 * batch.sample_ids[batch.sequence_ids] + batch.targets for batch in minibatch.batches]
    minibatch = minibatch.with_logprobs("old_logprobs", [code.float() for code in codes])

    trainer.update.budget.limit = 30
    smaller = trainer.update.fitted(minibatch, Attempt())

    assert len(smaller.batches) > len(minibatch.batches)
    for batch in smaller.batches:
        expected = 1000 * batch.sample_ids[batch.sequence_ids] + batch.targets
        assert torch.equal(batch.old_logprobs, expected.float()) and batch.ref_logprobs is None


def test_where_one_completion_does_not_fit_the_error_names_what_helps(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    limit_memory(trainer, 3, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match=r"gradient_checkpointing.*max_completion_length.*lora"):
        trainer.train_step()
    assert not trainer.optimizer.mid_step


def test_the_run_says_so_once_and_a_resumed_one_begins_with_what_fits(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(micro_batch_tokens=4096)
    limit_memory(trainer, 60, monkeypatch)
    with caplog.at_level(logging.WARNING):
        trainer.train_step()
        said = len(caplog.records)
        trainer.train_step()
    assert f"micro_batch_tokens = {trainer.update.budget.limit}" in caplog.text
    assert len(caplog.records) == said

    resumed = make_trainer(micro_batch_tokens=4096)
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.update.micro_batch_tokens == trainer.update.budget.limit < 60


def test_a_forward_for_fixed_log_probabilities_is_repeated_too(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(loss={"beta": 0.1, "kl_in_reward": True}, micro_batch_tokens=4096)
    refused = limit_memory(trainer, 60, monkeypatch)
    groups, _ = trainer.collect(Clock())
    assert refused and trainer.update.budget.limit <= 60
    totals = torch.stack([group.rewards - group.reward_table[:, 0] for group in groups])
    assert totals.abs().max() < 1e-4  # the policy is its reference still


def test_other_errors_are_not_taken_for_it(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
    trainer = make_trainer()
    attempts: list[int] = []

    def broken(*_: Any, **__: Any) -> Any:
        attempts.append(1)
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(update, "packed_loss", broken)
    with pytest.raises(RuntimeError, match="size mismatch"):
        trainer.train_step()
    assert len(attempts) == 1


def test_a_completion_longer_than_the_budget_is_not_laid_out_again_and_again(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    samples, totals = collected(trainer)
    trainer.update.budget.limit = 2
    minibatch = trainer.update.minibatch(samples, totals)
    same = trainer.update.fitted(minibatch, Attempt())
    assert same is minibatch


def make(seed: int, *, tied: bool, **model: Any) -> tuple[Policy, PolicyOptimizer]:
    config = AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=tied)
    torch.manual_seed(seed)
    policy = random_policy(
        config, ModelConfig(path="-", **model), attention="sdpa", device=torch.device("cpu")
    )
    return policy, PolicyOptimizer(policy.trainable(), OptimizerConfig(), total_steps=1)


def gradients(
    policy: Policy, optimizer: PolicyOptimizer, batches: list[PackedBatch], *, in_place: bool
) -> dict[str, torch.Tensor]:
    """What the optimiser would step by."""
    optimizer.zero_grad()
    head = policy.head
    for batch in batches:
        into = optimizer.gradient_of(head.weight) if in_place else None
        packed_loss(head, policy.hidden_states(batch), batch, weight_grad=into).loss.backward()
    return {name: optimizer.gradient_of(p).clone() for name, p in policy.trainable().items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_whole_models_gradient_is_that_of_autograd(seed: int, tied: bool, dtype: str) -> None:
    policy, optimizer = make(seed, tied=tied, dtype=dtype)
    batches = random_batches(policy, WORK)
    assert len(batches) > 1

    found = gradients(policy, optimizer, batches, in_place=True)

    expected = gradients(policy, optimizer, batches, in_place=False)
    parts = [gradients(policy, optimizer, [batch], in_place=False) for batch in batches]
    (head,) = (name for name, p in policy.trainable().items() if p is policy.head.weight)
    assert found[head].norm() > 0
    for name, gradient in expected.items():
        if name != head:
            assert torch.equal(found[name], gradient), name
    # Each of a micro-batch's gradients of the head is rounded, in 16 bits up to three times.
    rounding = 4 * torch.finfo(getattr(torch, dtype)).eps
    assert (found[head] - expected[head]).norm() <= rounding * sum(part[head].norm() for part in parts)


def test_a_frozen_head_has_no_gradient_to_add_to(seed: int) -> None:
    for model in ({"lora": LoraConfig(r=4)}, {"train_lm_head": False}):
        policy, optimizer = make(seed, tied=False, **model)

        assert optimizer.gradient_of(policy.head.weight) is None
