"""One update: its loss over micro-batches, and out of memory, a step as of small ones from the start."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig

from grpo_fast.config.policy import ModelConfig, OptimizerConfig
from grpo_fast.data.table import CompletionTable
from grpo_fast.loop import update as update_module
from grpo_fast.loop.collect import to_train
from grpo_fast.loop.trainer import Trainer
from grpo_fast.loop.update import packed_loss
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.objective.metrics import sum_metrics
from grpo_fast.plan.measure import random_batches, random_policy
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.policy import PolicyOptimizer
from grpo_fast.policy.out_of_memory import optimizer_step
from grpo_fast.record.logs import Clock
from grpo_fast.rollout.agreement import evaluation_mode

Gradients = dict[str, torch.Tensor]


def collected(trainer: Trainer) -> tuple[CompletionTable, StepTotals]:
    """One batch's completions, and the counts that their loss is divided by."""
    table, _ = trainer.collect(Clock())
    return to_train(table, trainer.config.advantage, trainer.config.loss)


def ready(trainer: Trainer, table: CompletionTable) -> CompletionTable:
    """One optimizer step's completions, ready for its gradient."""
    return trainer.update.with_fixed_logprobs(trainer.update.local(table))


def gradients(trainer: Trainer, table: CompletionTable, totals: StepTotals) -> tuple[float, Gradients]:
    """Loss and gradient of one optimizer step, without taking it."""
    _, shares = trainer.update.gradient(ready(trainer, table), totals)
    loss = sum(share["loss"].item() for share in shares)
    trained = trainer.policy.trainable().items()
    return loss, {name: p.grad.clone() for name, p in trained if p.grad is not None}


def shifted(table: CompletionTable, shift: float | torch.Tensor) -> CompletionTable:
    """With other log-probabilities of the sampler."""
    return table.with_columns(sampler_logprobs=table.columns["sampler_logprobs"] + shift)


def assert_same(found: tuple[float, Gradients], expected: tuple[float, Gradients]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy.trainable().values()])


@pytest.mark.parametrize(
    "loss",
    [
        {"loss_type": "grpo", "beta": 0.1},
        {"loss_type": "dr_grpo", "beta": 0.1},
        {"aggregation": "constant_length"},
        {},
    ],
)
def test_micro_batching_changes_neither_loss_nor_gradient(make_trainer, seed, loss):
    trainer = make_trainer(loss=loss, seed=seed)
    trainer.train_step()  # off the reference, so that the KL term has a gradient
    samples, totals = collected(trainer)
    counts, results = [], []
    for budget in (4096, 64, 16):
        trainer.update.configure(trainer.config.model_copy(update={"micro_batch_tokens": budget}))
        counts.append(len(trainer.update.annotator.packed(samples)))
        results.append(gradients(trainer, samples, totals))
    assert 1 == counts[0] < counts[1] < counts[2]
    for found in results[1:]:
        assert_same(found, results[0])


SIMILAR = {"similarity_threshold": 0.01, "max_group_size": 2}
OWN = """
import torch
from grpo_fast.objective import GRPOLossConfig, LossOutputs, policy_loss

def logs(completions, log_extra, **columns):
    log_extra("coherence", [len(text) / 999 for text in completions])
    return [float(len(text)) for text in completions]

def apart(inputs):
    out = policy_loss(inputs, GRPOLossConfig("dapo", entropy_coef=0.01))
    groups, sequences = inputs.groups, inputs.sequences
    squares = groups.mean(inputs.logprobs.square()) - groups.mean(inputs.logprobs).square()
    shares = sequences.mean(inputs.columns["coherence"] * inputs.columns["level"] * inputs.logprobs)
    regular = squares.sum() / inputs.totals.num_groups + shares.sum() / inputs.totals.num_sequences
    return LossOutputs(out.loss + regular, out.metrics)
"""


@pytest.mark.parametrize("strategy", ["prompt", "similarity"])
def test_a_custom_loss_sees_whole_groups_and_columns(make_trainer, toy, tmp_path, seed, strategy):
    (own := tmp_path / "own.py").write_text(OWN)
    rows = [json.loads(line) for line in Path(toy["dataset"]["source"]).read_text().splitlines()]
    (data := tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps(row | {"level": i % 5}) for i, row in enumerate(rows))
    )
    sections = {
        "loss": {"loss_type": f"{own}:apart", "columns": ["coherence", "level"]},
        "rewards": [{"reward": f"{own}:logs"}],
        "dataset": {"source": str(data)},
        "groups": {"strategy": strategy} | ({} if strategy == "prompt" else SIMILAR),
    }
    trainer = make_trainer(seed=seed, **sections)
    trainer.train_step()
    samples, totals = collected(trainer)
    results, counts = [], []
    for budget in (4096, 16):
        trainer.update.configure(trainer.config.model_copy(update={"micro_batch_tokens": budget}))
        batches = trainer.update.annotator.packed(samples)
        counts.append(len(batches))
        results.append(gradients(trainer, samples, totals))
    assert (counts[0], counts[1]) == (1, totals.num_groups) and totals.num_groups > 1
    assert totals.num_groups == 4 if strategy == "prompt" else totals.num_groups < 4
    assert_same(results[1], results[0])

    values, logprobs = samples.columns, trainer.update.annotator.columns(samples)[0].double()
    texts = [completion.text for completion in samples.objects["completion"]]
    levels = [prompt.index % 5 for prompt in samples.objects["prompt"]]
    assert values["rewards"].tolist() == samples.spread(torch.tensor([float(len(t)) for t in texts])).tolist()
    expected = 0.0
    for group in samples.compared.unique():
        own_tokens = samples.spread(samples.compared) == group
        expected += logprobs[own_tokens].var(correction=0).item() / totals.num_groups
    for tokens, text, level in zip(logprobs.split(samples.lengths.tolist()), texts, levels, strict=True):
        expected += len(text) / 999 * level * tokens.mean().item() / len(samples)
    plain = trainer.config.loss, GRPOLossConfig("dapo", entropy_coef=0.01)
    trainer.update.configure(trainer.config.model_copy(update={"loss": plain[1]}))
    assert results[0][0] - gradients(trainer, samples, totals)[0] == pytest.approx(expected, abs=1e-4)

    bad = [row | {"level": "x" if i == 3 else 1} for i, row in enumerate(rows)]
    with pytest.raises(ValueError, match=r"rows.jsonl, row 3: loss.columns: level = 'x' is not a finite"):
        data.write_text("\n".join(map(json.dumps, bad)))
        make_trainer(**sections)
    unknown = make_trainer(loss=sections["loss"] | {"columns": ["fluency"]}, rewards=sections["rewards"])
    with pytest.raises(ValueError, match=r"'fluency', which is neither .* there are coherence"):
        unknown.train_step()


def test_a_completion_longer_than_a_micro_batch_trains_with_recomputation(make_trainer, seed, monkeypatch):
    """In one micro-batch of its own, its MLPs in tiles: the gradient is that of a batch with room for it."""
    monkeypatch.setattr("grpo_fast.policy.layers.TILE_TOKENS", 10)
    dice, results = random.Random(seed), []
    lengths = (64, 5, 9)
    samples = CompletionTable.of([(1, 2)] * 3, [dice.choices(range(20), k=n) for n in lengths])
    advantages = torch.tensor([dice.gauss(0, 1) for _ in lengths])
    samples = samples.with_columns(advantages=samples.spread(advantages))
    for budget, recomputed in ((4096, False), (16, True)):
        trainer = make_trainer(micro_batch_tokens=budget, model={"gradient_checkpointing": recomputed})
        results.append(gradients(trainer, samples, StepTotals(78, 3)))
    assert trainer.update.annotator.packed(samples)[0].targets.numel() == 64
    assert_same(results[1], results[0])


def test_minibatches_share_whole_groups_and_the_counts(make_trainer):
    trainer = make_trainer(minibatches=3, advantage={"skip_flat_groups": False})
    samples, totals = collected(trainer)
    parts = trainer.update.split(samples, totals)

    groups = [{*part.groups.tolist()} for part, _ in parts]
    assert sorted(map(len, groups)) == [1, 1, 2] and len(set.union(*groups)) == 4
    for name, share in (("num_tokens", totals.num_tokens), ("num_sequences", totals.num_sequences)):
        assert [getattr(counts, name) for _, counts in parts] == [pytest.approx(share / 3)] * 3
    assert [counts.measured_sequences for _, counts in parts] == [len(part) for part, _ in parts]
    assert sum(counts.measured_tokens for _, counts in parts) == totals.num_tokens


def test_skipping_flat_groups_changes_no_gradient_and_metrics_are_of_others(make_trainer, seed):
    trainer = make_trainer(seed=seed)
    table, _ = trainer.collect(Clock())
    odd = table.groups % 2 == 1
    flat = table.with_facts(
        flat=table.facts["flat"] | odd, advantage=table.facts["advantage"].where(~odd, 0.0)
    )
    config, loss = trainer.config.advantage, trainer.config.loss
    skipped, totals = to_train(flat, config, loss)
    kept, same_totals = to_train(flat, config.model_copy(update={"skip_flat_groups": False}), loss)
    assert len(skipped) < len(kept) and totals == same_totals
    assert_same(gradients(trainer, skipped, totals), gradients(trainer, kept, totals))

    (entropy,) = trainer.update.annotator.columns(skipped, "entropy")
    metrics = trainer.update.run(skipped, totals, Clock())
    assert metrics["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_ratio/region_mean"] == 0
    assert metrics["sampling/logp_difference_mean"] < 1e-4


def count_forwards(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows by one for each forward of the policy; true where it is for a gradient."""
    forward, calls = trainer.policy.hidden_states, []

    def counted(batch: Any, **given: Any) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return forward(batch, **given)

    monkeypatch.setattr(trainer.policy, "hidden_states", counted)
    return calls


@pytest.mark.parametrize(
    ("old_logprobs", "minibatches", "extra"),
    [("recompute", 1, 0), ("recompute", 2, 1), ("sampler", 2, 0)],
)
def test_old_logprobs_cost_a_forward_only_for_stale_minibatches(
    make_trainer, monkeypatch, old_logprobs: str, minibatches: int, extra: int
):
    sections = {"num_iterations": 2, "minibatches": minibatches, "old_logprobs": old_logprobs}
    trainer = make_trainer(**sections, micro_batch_tokens=4096, optimizer={"learning_rate": 2e-2})
    trainer.sampler_seen = True  # which takes one more, once
    calls = count_forwards(trainer, monkeypatch)
    metrics = trainer.train_step().metrics
    assert calls.count(True) == 2 * minibatches and calls.count(False) == extra
    assert metrics["clip_ratio/region_mean"] > 0  # the second epoch is off-policy


def test_no_two_micro_batches_turns_or_steps_share_the_heads_seed(make_trainer, monkeypatch, seed):
    def seeds(steps: int) -> list[int]:
        found: list[int] = []

        def loss(*arguments: Any, **options: Any) -> Any:
            found.append(options["seed"])
            return packed_loss(*arguments, **options)

        monkeypatch.setattr(update_module, "packed_loss", loss)
        trainer = make_trainer(num_iterations=2, seed=seed, micro_batch_tokens=64)
        for _ in range(steps):
            trainer.train_step()
        return found

    found, again = seeds(2), seeds(1)

    assert len({*found}) == len(found) > len(again) > 1
    assert found[: len(again)] == again


def test_old_logprobs_are_without_lora_dropout_and_the_first_ratio_is_one(make_trainer, monkeypatch, seed):
    lora = {"r": 4, "dropout": 0.5}
    trainer = make_trainer(num_iterations=2, minibatches=2, seed=seed, model={"lora": lora})
    update, given = trainer.update, []
    with torch.no_grad():  # an adapter that starts at zero drops nothing out
        for name, parameter in trainer.policy.trainable().items():
            parameter.add_(0.1 if "lora_B" in name else 0.0)
    table, totals = collected(trainer)
    with evaluation_mode(trainer.policy.model):
        scored = [update.annotator.columns(own)[0] for own, _ in update.split(table, totals)]
    gradient = update.gradient

    def noted(table: CompletionTable, *arguments: Any) -> Any:
        found = gradient(table, *arguments)
        given.append((table.columns.get("old_logprobs"), sum_metrics(found[1])))
        return found

    monkeypatch.setattr(update, "gradient", noted)
    update.run(table, totals, Clock())

    (first, metrics), *later = given
    assert first is None and metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1
    for (old, _), expected in zip(later, [scored[1], *scored], strict=True):
        torch.testing.assert_close(old, expected, rtol=0, atol=1e-6)


def test_the_samplers_logprobs_as_old_ones_put_its_error_into_the_ratio(make_trainer, seed):
    trainer = make_trainer(old_logprobs="sampler", seed=seed)
    samples, totals = collected(trainer)
    for given, ratio in ((samples, 1.0), (shifted(samples, -0.5), math.exp(0.5))):
        metrics = sum_metrics(trainer.update.gradient(ready(trainer, given), totals)[1])
        assert metrics["policy/ratio_max"] == pytest.approx(ratio, rel=1e-3)
        assert (metrics["clip_ratio/high_mean"] > 0) == (ratio > 1.2)


def test_an_on_policy_step_corrects_for_the_sampler_without_a_forward(make_trainer, monkeypatch, seed):
    loss = {"sampler_correction": "token_truncate", "sampler_clip_max": 1.25}
    trainer = make_trainer(loss=loss, seed=seed, micro_batch_tokens=4096)
    samples, totals = collected(trainer)
    expected: Gradients = {}
    for shift, weight in ((0.0, 1.0), (-0.1, math.exp(0.1)), (-1.0, 1.25)):
        calls = count_forwards(trainer, monkeypatch)
        _, grads = gradients(trainer, shifted(samples, shift), totals)
        assert calls == [True]
        expected = expected or grads
        for name, grad in grads.items():
            torch.testing.assert_close(grad, weight * expected[name], rtol=1e-3, atol=1e-5)

    with pytest.raises(ValueError, match="sampler_correction = 'token_truncate'"):
        make_trainer(old_logprobs="sampler", loss={"sampler_correction": "token_truncate"})


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.01}], ids=str)
def test_no_ratio_is_taken_to_a_truncated_distribution(make_trainer, cut):
    trainer = make_trainer(rollout=cut)
    assert not [name for name in trainer.train_step().metrics if name.startswith("sampling/")]

    (key,) = cut
    for reader in ({"old_logprobs": "sampler"}, {"loss": {"sampler_correction": "token_mask"}}):
        with pytest.raises(ValueError, match=rf"({'|'.join(reader)}).*rollout\.{key} = .*leave out"):
            make_trainer(rollout=cut, **reader)


@pytest.mark.parametrize(
    ("sections", "asking"),
    [
        ({}, [0, 10, 20]),
        ({"old_logprobs": "sampler"}, [*range(21)]),
        ({"loss": {"loss_type": "grpo_fast.objective.loss:policy_loss"}}, [*range(21)]),
    ],
    ids=str,
)
def test_the_sampler_returns_logprobs_where_they_are_read_or_each_10_steps(
    make_trainer, monkeypatch, sections, asking
):
    trainer, asked = make_trainer(**sections), []

    def generate(prompts: Any, n: int, sampling: Any, observer: Any) -> Any:
        asked.extend([trainer.step] if sampling.logprobs else [])
        raise InterruptedError

    monkeypatch.setattr(trainer.engine, "generate", generate)
    for trainer.step in range(21):
        with pytest.raises(InterruptedError):
            trainer.rollout(trainer.prompts.next(), 0, Clock())
    assert asked == asking and not trainer.evaluation_sampling.logprobs


def test_adaptive_entropy_raises_its_coefficient_below_its_target(make_trainer):
    loss = {"use_adaptive_entropy": True, "entropy_target": 100.0, "entropy_coef_delta": 0.01}
    trainer = make_trainer(loss=loss)
    coefficients = [trainer.train_step().metrics["entropy_coef"] for _ in range(3)]
    assert coefficients == pytest.approx([0.0, 0.01, 0.02])


def limit_memory(
    trainer: Trainer, tokens: int, monkeypatch: pytest.MonkeyPatch, *, backward: bool = False
) -> list[int]:
    """The policy's forward, or its backward after the head's, raises above so many tokens.

    Returns:
        The sizes that were refused.
    """
    forward: Callable[..., torch.Tensor] = trainer.policy.hidden_states
    refused: list[int] = []

    def bounded(batch: Any, **given: Any) -> torch.Tensor:
        size = batch.input_ids.numel()

        def refuse(_: Any = None) -> None:
            refused.append(size)
            raise torch.OutOfMemoryError(f"tried to allocate for {size} tokens")

        if size > tokens and not backward:
            refuse()
        hidden = forward(batch, **given)
        if size > tokens and hidden.requires_grad:
            hidden.register_hook(refuse)
        return hidden

    monkeypatch.setattr(trainer.policy, "hidden_states", bounded)
    return refused


@pytest.mark.parametrize(
    ("sections", "backward"),
    [
        ({}, True),
        ({"model": {"dtype": "bfloat16"}}, True),
        ({"num_iterations": 2}, False),
        ({"loss": {"beta": 0.1, "kl_in_reward": True}}, False),
        ({"loss": {"top_entropy_quantile": 0.5}}, False),
        ({"model": {"lora": {"r": 4, "dropout": 0.5}}}, False),
    ],
    ids=str,
)
def test_a_step_after_out_of_memory_equals_one_of_small_micro_batches(
    make_trainer, monkeypatch, seed: int, sections: dict[str, Any], backward: bool
) -> None:
    trainer = make_trainer(seed=seed, micro_batch_tokens=4096, **sections)
    refused = limit_memory(trainer, 40, monkeypatch, backward=backward)
    found = trainer.train_step()
    budget = trainer.update.annotator.budget.limit

    assert refused and budget is not None and budget < min(refused)
    assert found.timings["memory/micro_batch_tokens"] == budget
    small = make_trainer(seed=seed, micro_batch_tokens=budget, **sections)
    assert found.metrics == small.train_step().metrics
    assert torch.equal(weights(trainer), weights(small))
    small.load_state_dict(trainer.state_dict())
    assert small.update.annotator.budget.limit == budget  # also after a resume


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "mismatch"])
def test_an_optimizer_step_that_does_not_fit_names_the_remedy(make_trainer, monkeypatch, words) -> None:
    broken, trainer = Mock(side_effect=RuntimeError(words)), make_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(trainer.optimizer, "step", broken)
        said = words if words == "mismatch" else rf"model\.lora.*train_lm_head.*{words}"
        with pytest.raises(RuntimeError, match=said):
            optimizer_step(trainer.optimizer)
    if words == "mismatch":  # smaller micro-batches do not help
        monkeypatch.setattr(update_module, "packed_loss", broken)
        with pytest.raises(RuntimeError, match=words):
            trainer.train_step()
        assert broken.call_count == 2


def test_where_one_completion_does_not_fit_the_error_names_the_remedy(make_trainer, monkeypatch) -> None:
    trainer = make_trainer()
    limit_memory(trainer, 3, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match=r"gradient_checkpointing.*max_completion_length.*lora"):
        trainer.train_step()
    assert not trainer.optimizer.mid_step


def test_smaller_micro_batches_are_logged_once(make_trainer, monkeypatch, caplog) -> None:
    trainer = make_trainer(micro_batch_tokens=4096)
    limit_memory(trainer, 60, monkeypatch)
    with caplog.at_level(logging.WARNING):
        trainer.train_step()
        said = len(caplog.records)
        trainer.train_step()
    assert f"micro_batch_tokens = {trainer.update.annotator.budget.limit}" in caplog.text
    assert len(caplog.records) == said


SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 2, "bos_token_id": 1}
WORK = StepSizes(prompts=3, generations=2, prompt_length=6, completion_length=5, micro_batch_tokens=20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_whole_models_gradient_is_that_of_autograd(seed: int, tied: bool, dtype: str) -> None:
    config = AutoConfig.for_model("llama", **SIZES, **HEADS, tie_word_embeddings=tied)
    torch.manual_seed(seed)
    model = ModelConfig(path="-", dtype=dtype)
    policy = random_policy(config, model, attention="sdpa", device=torch.device("cpu"))
    optimizer, head = PolicyOptimizer(policy.trainable(), OptimizerConfig(), total_steps=1), policy.head

    def gradients(batches: Sequence[Any], *, in_place: bool) -> Gradients:
        """What the optimizer would step by."""
        optimizer.zero_grad()
        for batch in batches:
            packed_loss(policy, batch, optimizer=optimizer if in_place else None).loss.backward()
        return {name: optimizer.gradient_of(p).clone() for name, p in policy.trainable().items()}

    batches = random_batches(policy, WORK)
    assert len(batches) > 1
    found, expected = gradients(batches, in_place=True), gradients(batches, in_place=False)
    (name,) = (name for name, p in policy.trainable().items() if p is head.weight)
    mine, theirs = found.pop(name), expected.pop(name)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    # Each of a micro-batch's gradients of the head is rounded, in 16 bits up to three times.
    parts = sum(gradients([batch], in_place=False)[name].norm() for batch in batches)
    assert mine.norm() > 0
    assert (mine - theirs).norm() <= 4 * torch.finfo(getattr(torch, dtype)).eps * parts
