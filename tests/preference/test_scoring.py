"""Completions in micro-batches; the reference is computed once, and never of another model or data."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.policy import load_policy
from grpo_fast.policy.config import LoraConfig
from grpo_fast.preference import scoring as module
from grpo_fast.preference.scoring import ComparisonBatches, fingerprint, reference_logprobs, score
from grpo_fast.run.build import build_preference_trainer


@pytest.fixture
def config(make_run):
    return make_run("dpo", {"loss": {"loss_type": "kto"}})


@pytest.fixture
def trainer(config):
    return build_preference_trainer(config)


def test_completions_are_scored_in_order_as_the_model_scores_each_alone(make_run):
    trainer = build_preference_trainer(make_run("rank", {}))
    comparisons = list(trainer.comparisons.values())[:8]
    first = comparisons[0]
    prompt, lengths = len(first.prompt.token_ids), sum(map(len, first.completion_ids))
    assert first.num_tokens == prompt + lengths

    scores = score(comparisons, ComparisonBatches(trainer.policy, 70))

    for found, comparison in zip(scores, comparisons, strict=True):
        prompt_ids = comparison.prompt.token_ids
        for value, completion in zip(found, comparison.completion_ids, strict=True):
            logits = trainer.policy.model(torch.tensor([prompt_ids + completion])).logits[0]
            logprobs = logits.log_softmax(-1)[len(prompt_ids) - 1 : -1]
            alone = logprobs.gather(1, torch.tensor(completion)[:, None]).sum()
            torch.testing.assert_close(value, alone, rtol=1e-4, atol=1e-4)


def test_the_second_run_reads_what_the_first_has_computed(trainer, tmp_path, monkeypatch):
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".safetensors"]
    monkeypatch.setattr(module, "score", lambda *_: pytest.fail("computed again"))

    again = reference_logprobs(trainer.policy, trainer.comparisons, max_tokens=100, folder=tmp_path / "cache")

    assert again.keys() == trainer.reference.keys() == trainer.comparisons.keys()
    for index, comparison in trainer.comparisons.items():
        # Its own completion and the mismatched one.
        assert len(again[index]) == len(comparison.sequences) == 2
        assert again[index].equal(trainer.reference[index])


def test_the_reference_is_of_these_weights_and_tokens_and_not_of_new_adapters(config, trainer):
    first = fingerprint(trainer.policy, trainer.comparisons)
    adapted = load_policy(config.model.model_copy(update={"lora": LoraConfig(r=2)}))
    assert fingerprint(adapted, trainer.comparisons) == first
    fewer = dict(list(trainer.comparisons.items())[1:])
    assert fingerprint(trainer.policy, fewer) != first
    with torch.no_grad():
        next(iter(trainer.policy.trainable().values())).view(-1)[0].add_(1e-3)
    assert fingerprint(trainer.policy, trainer.comparisons) != first


def test_no_reference_is_computed_for_a_loss_without_one(make_run, tmp_path):
    trainer = build_preference_trainer(make_run("dpo", {"loss": {"loss_type": "simpo"}}))
    assert trainer.reference == {} and not (tmp_path / "cache").exists()


def test_a_damaged_file_and_a_folder_that_cannot_be_written_are_named(trainer, tmp_path):
    (path,) = (tmp_path / "cache").iterdir()
    fewer = dict(list(trainer.comparisons.items())[1:])
    other = reference_logprobs(trainer.policy, fewer, max_tokens=100, folder=tmp_path / "other")
    (of_fewer,) = (tmp_path / "other").iterdir()
    assert other.keys() == fewer.keys()
    for content in (b"", b"not safetensors at all", of_fewer.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)):
            reference_logprobs(trainer.policy, trainer.comparisons, max_tokens=9, folder=tmp_path / "cache")
    with pytest.raises(OSError, match=r"GRPO_FAST_CACHE"):
        reference_logprobs(trainer.policy, trainer.comparisons, max_tokens=100, folder=path / "cache")
