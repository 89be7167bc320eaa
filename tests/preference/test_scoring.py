"""Completions in micro-batches; the reference is computed once, and never of another model or data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_fast.policy import load_policy
from grpo_fast.policy.config import LoraConfig
from grpo_fast.preference import scoring as module
from grpo_fast.preference.scoring import Request, RequestBatches, fingerprint, reference_logprobs, score
from grpo_fast.run import build_preference_trainer


def test_a_prompt_counts_once_where_it_is_shared():
    request = Request((1, 2, 3), ((4,), (5, 6)))
    assert (request.num_tokens(), request.num_tokens(shared=False)) == (6, 9)


def test_completions_are_scored_in_order_as_the_model_scores_each_alone(make_run, seed):
    trainer = build_preference_trainer(make_run("rank", {}))
    policy = trainer.policy
    comparisons = list(trainer.comparisons.values())[:12]
    requests = [Request(c.prompt.token_ids, c.completion_ids) for c in comparisons]
    for found, request in zip(score(requests, RequestBatches(policy, 70)), requests, strict=True):
        for value, completion in zip(found, request.completion_ids, strict=True):
            ids = torch.tensor([request.prompt_ids + completion])
            logprobs = policy.model(ids).logits[0].log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
            alone = logprobs.gather(1, torch.tensor(completion)[:, None]).sum()
            torch.testing.assert_close(value, alone, rtol=1e-4, atol=1e-4)


@pytest.fixture
def config(make_run):
    return make_run("dpo", {"loss": {"loss_type": "kto"}})


@pytest.fixture
def trainer(config):
    return build_preference_trainer(config)


def cached(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").iterdir())


def test_the_second_run_reads_what_the_first_has_computed(trainer, tmp_path, monkeypatch):
    assert [path.suffix for path in cached(tmp_path)] == [".safetensors"]
    monkeypatch.setattr(module, "score", lambda *_: pytest.fail("computed again"))

    again = reference_logprobs(trainer.policy, trainer.comparisons, max_tokens=100, folder=tmp_path / "cache")

    assert again.keys() == trainer.reference.keys() == trainer.comparisons.keys()
    for index, comparison in trainer.comparisons.items():
        # Its own completion and the mismatched one.
        assert len(again[index]) == len(comparison.sequences) == 2
        assert again[index].equal(trainer.reference[index])


def test_other_weights_and_other_tokens_are_computed_afresh(trainer):
    first = fingerprint(trainer.policy, trainer.comparisons)
    fewer = dict(list(trainer.comparisons.items())[1:])
    assert fingerprint(trainer.policy, fewer) != first
    with torch.no_grad():
        next(iter(trainer.policy.trainable().values())).view(-1)[0].add_(1e-3)
    assert fingerprint(trainer.policy, trainer.comparisons) != first


def test_new_adapters_leave_the_reference_as_it_is(config, trainer):
    adapted = load_policy(config.model.model_copy(update={"lora": LoraConfig(r=2)}))
    assert fingerprint(adapted, trainer.comparisons) == fingerprint(trainer.policy, trainer.comparisons)


def test_no_reference_is_computed_for_a_loss_without_one(make_run, tmp_path):
    trainer = build_preference_trainer(make_run("dpo", {"loss": {"loss_type": "simpo"}}))
    assert trainer.reference == {} and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_a_damaged_file_and_a_folder_that_cannot_be_written_are_named(trainer, tmp_path, content):
    (path,) = cached(tmp_path)
    path.write_bytes(content)
    arguments = {"max_tokens": 100}
    with pytest.raises(ValueError, match=str(path)):
        reference_logprobs(trainer.policy, trainer.comparisons, folder=tmp_path / "cache", **arguments)
    with pytest.raises(OSError, match=r"GRPO_FAST_CACHE"):
        reference_logprobs(trainer.policy, trainer.comparisons, folder=path / "cache", **arguments)
