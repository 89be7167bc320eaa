"""Distillation: the divergence to a teacher over whole vocabularies, at the tokens of given contexts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.data.table import CompletionTable
from grpo_fast.loop.collect import to_train
from grpo_fast.loop.trainer import Trainer
from grpo_fast.policy.architecture import own_logits
from grpo_fast.record.logs import Clock
from tests.conftest import save_llama, word_tokenizer
from tests.loop.test_update import collected, gradients

WORDS = ["<unk>", "</s>", *(f"w{i}" for i in range(2, 24))]
ALONE: dict[str, Any] = {"rewards": [], "evaluation": {"dataset": None, "threshold": 1.0}}


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model with the toy's tokens: wider, deeper, its head not tied."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "initializer_range": 0.2}
    save_llama(folder, word_tokenizer(WORDS, "</s>"), **sizes)
    return str(folder)


@pytest.fixture
def distilled(make_trainer: Callable[..., Trainer], teacher: str) -> Callable[..., Trainer]:
    """Builds a trainer of the toy that learns from the teacher without rewards."""

    def make(**sections: Any) -> Trainer:
        return make_trainer(**{"method": "opd", "reference": {"path": teacher}, **ALONE, **sections})

    return make


def distributions(model: Any, contexts: list[list[int]], lengths: list[int], temperature: float) -> Any:
    """Return log-probabilities (N, V) float64 at the last tokens of each context, from whole logits."""
    parts = [own_logits(model, ids)[-length - 1 : -1] for ids, length in zip(contexts, lengths, strict=True)]
    return (torch.cat(parts).double() / temperature).log_softmax(-1)


def contexts_of(table: CompletionTable) -> list[list[int]]:
    return [torch.cat([table.prompt_of(i), table.tokens_of(i)]).tolist() for i in range(len(table))]


def divergences(p: torch.Tensor, q: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the divergence (N,) of p from q, as GKD and TRL define it."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if beta in (0.0, 1.0):
        return kl(p, q) if beta else kl(q, p)
    mixture = (p.exp() * (1 - beta) + q.exp() * beta).log()
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


EXACT = {"loss_type": "grpo", "beta": 0.1, "kl_estimator": "exact"}


@pytest.mark.parametrize(
    ("sections", "beta", "by_sequence"),
    [
        ({"rollout": {"temperature": 0.8}}, 1.0, False),
        ({"loss": {"jsd_beta": 0.0, "aggregation": "sequence_mean"}}, 0.0, True),
        ({"loss": {"jsd_beta": 0.3}, "model": {"lora": {"r": 2}, "packing": "none"}}, 0.3, False),
        ({"method": None, "loss": EXACT}, 1.0, True),
        ({"method": None, "loss": EXACT, "reference": {}}, 1.0, True),
        ({"method": None, "loss": EXACT, "reference": {}, "model": {"lora": {"r": 2}}}, 1.0, True),
    ],
)
def test_the_loss_is_that_of_whole_logits_in_any_micro_batches(
    distilled, tmp_path, seed, sections, beta, by_sequence
):
    if "method" in sections:  # without spread in the rewards the KL is the whole loss
        (own := tmp_path / "own.py").write_text("def one(completions, **_): return [1.0] * len(completions)")
        sections = {**sections, "rewards": [{"reward": f"{own}:one"}]}
    trainer = distilled(seed=seed, **sections)
    for parameter in trainer.policy.trainable().values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    table, totals = collected(trainer)
    results = []
    for budget in (4096, 24):
        trainer.update.configure(trainer.config.model_copy(update={"micro_batch_tokens": budget}))
        results.append(gradients(trainer, table, totals))
    policy, lengths = trainer.policy, table.lengths.tolist()
    trained = policy.trainable()
    for parameter in trained.values():
        parameter.grad = None
    with policy.reference() as reference:
        q = distributions(reference.base_model, contexts_of(table), lengths, trainer.sampling.temperature)
    p = distributions(policy.base_model, contexts_of(table), lengths, trainer.sampling.temperature)
    weights = torch.full((len(p),), 1 / len(p), dtype=torch.float64)
    if by_sequence:
        weights = torch.cat([torch.full((n,), 1 / (n * len(table)), dtype=torch.float64) for n in lengths])
    scale = trainer.config.loss.beta or 1.0
    expected = scale * (weights * divergences(p, q, beta)).sum()
    of_logits = dict(zip(trained, torch.autograd.grad(expected, [*trained.values()]), strict=True))
    for value, found in results:
        assert value == pytest.approx(expected.item(), rel=1e-5)
        for name, gradient in of_logits.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-6)


def test_gkd_trains_on_given_completions_in_its_share_of_steps(distilled, toy, tmp_path, seed):
    rows = [*map(json.loads, Path(toy["dataset"]["source"]).read_text().splitlines())]
    (data := tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps(row | {"answer": f"w{2 + i % 20} w5"}) for i, row in enumerate(rows))
    )
    dataset = {"source": str(data), "rename": {"answer": "completion"}}
    trainer = distilled(method="gkd", dataset=dataset, seed=seed, rewards=toy["rewards"])
    sampled = []
    for _ in range(12):
        sampled.append(trainer.on_policy)
        table, _ = collected(trainer)
        if not trainer.on_policy:
            prompts = table.objects["prompt"]
            texts = [f"w{2 + prompt.index % 20} w5 </s>" for prompt in prompts]
            assert [trainer.policy.tokenizer.decode(table.tokens_of(i)) for i in range(4)] == texts
        assert len(table) == (24 if trainer.on_policy else 4)
        trainer.step += 1
    assert {*sampled} == {True, False} and trainer.train_step().metrics["divergence"] > 0


@pytest.mark.parametrize(
    ("method", "template", "sections"),
    [
        (
            "sdft",
            "{prompt} w9 {completion}",
            {"model": {"lora": {"r": 2}}, "reference": {"weights": "policy"}},
        ),
        ("sdpo", "{prompt} w9 {solution} {feedback}", {"reference": {"success_threshold": 0.3}}),
    ],
)
def test_a_teacher_that_sees_more_is_the_model_with_that_prompt(
    distilled, toy, tmp_path, seed, method, template, sections
):
    rows = [*map(json.loads, Path(toy["dataset"]["source"]).read_text().splitlines())]
    (data := tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps(row | {"completion": f"w{2 + i % 20} w5"}) for i, row in enumerate(rows))
    )
    (own := tmp_path / "own.py").write_text(
        "def hints(completions, log_extra, **columns):\n"
        "    log_extra('feedback', ['w11' if len(text) % 2 else '' for text in completions])\n"
        "    return [float('w1' in text) for text in completions]\n"
    )
    reference = {"prompt_template": template, **sections.pop("reference", {})}
    rewards = [{"reward": f"{own}:hints"}] if method == "sdpo" else []
    trainer = distilled(
        method=method,
        dataset={"source": str(data)},
        reference=reference,
        rewards=rewards,
        seed=seed,
        **sections,
    )
    assert 0 < trainer.train_step().metrics["completion/taught"] <= 1
    table, _ = trainer.collect(Clock())
    contexts, decode = table.objects["context"], trainer.policy.tokenizer.decode
    texts = [completion.text for completion in table.objects["completion"]]
    for row, (prompt, context) in enumerate(zip(table.objects["prompt"], contexts, strict=True)):
        if method == "sdft":
            assert decode(list(context)) == f"{prompt.prompt} w9 w{2 + prompt.index % 20} w5"
            continue
        mates = [i for i in range(len(table)) if table.groups[i] == table.groups[row] and i != row]
        solved = next((texts[i] for i in mates if "w1" in texts[i]), "")
        hint = "w11" if len(texts[row]) % 2 else ""
        expected = f"{prompt.prompt} w9 {solved} {hint}".split() if solved or hint else None
        assert (context and decode(list(context)).split()) == expected
    seen = [row for row, context in enumerate(contexts) if context is not None]
    kept, totals = to_train(table.select(seen), trainer.config.advantage, trainer.config.loss)
    trainer.update.configure(trainer.config.model_copy(update={"micro_batch_tokens": 40}))
    value, _ = gradients(trainer, kept, totals)
    policy, lengths = trainer.policy, kept.lengths.tolist()
    own = trainer.config.reference.weights == "policy"
    with torch.no_grad():
        p = distributions(policy.base_model, contexts_of(kept), lengths, 1.0)
        asked = [[*c, *kept.tokens_of(i).tolist()] for i, c in enumerate(kept.objects["context"])]
        with nullcontext(policy) if own else policy.reference() as teacher:
            q = distributions(teacher.base_model, asked, lengths, 1.0)
        expected = divergences(p, q, trainer.config.loss.jsd_beta).mean().item()
    assert value == pytest.approx(expected, rel=1e-4) and value > 1e-4


def test_a_teacher_in_4_bits_teaches_a_policy_of_whole_weights(distilled, teacher):
    pytest.importorskip("bitsandbytes")
    trainer = distilled(reference={"path": teacher, "quantization": "nf4"})
    with trainer.policy.reference() as reference:
        assert reference.quantized and not trainer.policy.quantized
    metrics = trainer.train_step().metrics
    assert metrics["divergence"] > 0 and metrics["grad_norm"] > 0


def test_rewards_beside_a_teacher_are_logged_and_do_not_train(distilled, toy, seed):
    scored = {"rewards": toy["rewards"], "evaluation": toy["evaluation"]}
    found = []
    for sections in ({}, scored):
        trainer = distilled(seed=seed, **sections)
        steps = [trainer.train_step() for _ in range(2)]
        found.append([step.metrics["loss"] for step in steps])
    assert found[0] == found[1] and "reward/near_w7/mean" in steps[0].metrics
    assert not {"groups/flat", "reward/std"} & steps[0].metrics.keys()  # alerts would call them no signal
    assert trainer.evaluate().n == 10


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, r"reference\.path = .* is not read without a KL"),
        (
            {"loss": {"beta": 0.1}, "reference": {"prompt_template": "{prompt} w3"}},
            r"prompt_template = .* exact KL alone",
        ),
        ({"method": "sdft"}, "names {completion}, which the row does not have"),
        ({"method": "gkd"}, r"'completion'.*dataset\.rename"),
    ],
)
def test_a_reference_that_cannot_be_read_is_refused_before_weights(
    distilled, toy, monkeypatch, sections, said
):
    monkeypatch.setattr("grpo_fast.policy.load.load_whole", None)
    if sections.get("method") == "sdft":
        sections = {"reference": {}, **sections}
    with pytest.raises(ValueError, match=said):
        distilled(**{"method": None, "rewards": toy["rewards"], **sections})


def test_another_vocabulary_is_refused_before_weights_are_loaded(distilled, tmp_path, monkeypatch):
    swapped = [*WORDS[:3], WORDS[4], WORDS[3], *WORDS[5:]]
    save_llama(tmp_path / "other", word_tokenizer(swapped, "</s>"))
    monkeypatch.setattr("grpo_fast.policy.load.load_whole", None)
    with pytest.raises(ValueError, match=r"reference\.path = .*2 of 24 tokens differ, the first is 3, 'w4'"):
        distilled(reference={"path": str(tmp_path / "other")})
    with pytest.raises(ValueError, match=r"reference\.path = .*no such folder"):
        distilled(reference={"path": str(tmp_path / "nowhere")})
