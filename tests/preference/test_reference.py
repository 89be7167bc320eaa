"""Reference log-probabilities: computed once, found again, never of another model or other data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_fast.policy import load_policy
from grpo_fast.policy.config import LoraConfig
from grpo_fast.preference import reference as module
from grpo_fast.preference.assemble import build_preference_trainer
from grpo_fast.preference.reference import fingerprint, reference_logprobs


@pytest.fixture
def trainer(make_run):
    return build_preference_trainer(make_run("dpo", {"loss": {"loss_type": "kto"}}))


def cached(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").iterdir())


def test_the_second_run_reads_what_the_first_has_computed(trainer, tmp_path, monkeypatch):
    assert [path.suffix for path in cached(tmp_path)] == [".safetensors"]
    monkeypatch.setattr(module, "score", lambda *_: pytest.fail("computed again"))

    again = reference_logprobs(trainer.policy, trainer.comparisons, max_tokens=100, folder=tmp_path / "cache")

    assert again.keys() == trainer.reference.keys() == trainer.comparisons.keys()
    for index, comparison in trainer.comparisons.items():
        assert (
            len(again[index]) == len(comparison.sequences) == 2
        )  # its own completion and the mismatched one
        assert again[index].equal(trainer.reference[index])


def test_other_weights_and_other_tokens_are_computed_afresh(trainer):
    first = fingerprint(trainer.policy, trainer.comparisons)
    fewer = dict(list(trainer.comparisons.items())[1:])
    assert fingerprint(trainer.policy, fewer) != first
    with torch.no_grad():
        next(iter(trainer.policy.trainable().values())).view(-1)[0].add_(1e-3)
    assert fingerprint(trainer.policy, trainer.comparisons) != first


def test_new_adapters_leave_the_reference_as_it_is(trainer):
    adapted = load_policy(trainer.config.model.model_copy(update={"lora": LoraConfig(r=2)}))
    assert fingerprint(adapted, trainer.comparisons) == fingerprint(trainer.policy, trainer.comparisons)


def test_no_reference_is_computed_for_a_loss_without_one(make_run, tmp_path):
    trainer = build_preference_trainer(make_run("dpo", {"loss": {"loss_type": "simpo"}}))
    assert trainer.reference == {} and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_a_damaged_file_is_named(trainer, tmp_path, content):
    (path,) = cached(tmp_path)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} are damaged .* delete the file"):
        reference_logprobs(trainer.policy, trainer.comparisons, max_tokens=100, folder=tmp_path / "cache")


def test_a_folder_that_cannot_be_written_is_named(trainer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written .* set GRPO_FAST_CACHE"):
        reference_logprobs(
            trainer.policy, trainer.comparisons, max_tokens=100, folder=tmp_path / "file" / "cache"
        )
