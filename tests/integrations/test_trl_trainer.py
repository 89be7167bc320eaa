"""`FastGRPOTrainer` against TRL's own: losses, gradients, metrics, fallbacks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

trl = pytest.importorskip("trl", "1.16", reason="pip install --no-deps 'trl~=1.16.0'")

from trl.trainer import utils  # noqa: E402
from words import GROUPED, assert_same_history, make_trainer, train_words  # noqa: E402

from grpo_fast.integrations.losses import LOSS_TYPES  # noqa: E402
from grpo_fast.integrations.trl import FastGRPOTrainer, patched  # noqa: E402


@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        ("grpo", {"lora": True}),
        ("dapo", {}),
        ("dapo", {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
        ("dapo", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
    ],
    ids=["lora", "plain", "compiled", "checkpointed"],
)
def test_steps_of_training_are_the_same(loss_type, options, model_folder):
    """Gradient accumulation over two micro-batches, two optimizer steps a generation, KL, clipping."""
    run, lora = (model_folder, loss_type, 3), options.get("lora", False)
    theirs = train_words(trl.GRPOTrainer, *run, lora=lora)
    assert_same_history(train_words(FastGRPOTrainer, *run, **options), theirs)
    if lora:
        with patched():
            assert_same_history(train_words(trl.GRPOTrainer, *run, lora=True), theirs)


def test_a_second_iteration_needs_no_scoring_before_the_first(model_folder, monkeypatch):
    """The training forward of the first yields the old log-probabilities of the second."""
    scored, original = Counter(), trl.GRPOTrainer._get_per_token_logps_and_entropies

    def counting(self: Any, *arguments: Any, **options: Any) -> Any:
        scored[type(self)] += not options.get("compute_entropy")
        return original(self, *arguments, **options)

    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
    options = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.0}
    kinds = FastGRPOTrainer, trl.GRPOTrainer
    assert_same_history(*(train_words(kind, model_folder, "dapo", steps=4, **options) for kind in kinds))
    assert scored == {trl.GRPOTrainer: 2, FastGRPOTrainer: 0}  # two generations


def trainer_of(kind: type, folder: Path, **options: Any) -> Any:
    built = make_trainer(
        kind, folder, [{"prompt": "w1"}] * 4, **GROUPED | {"max_completion_length": 6} | options
    )
    built.current_gradient_accumulation_steps = 2
    return built


def results_of(trainer: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the loss, the metrics and the loss in evaluation mode, and gradients."""
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    loss.backward()
    metrics = {name: value for name, (value,) in trainer._metrics["train"].items()}
    trainer.model.eval()
    with torch.no_grad():
        evaluated = trainer.compute_loss(trainer.model, dict(inputs)).item()
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    return {"loss": loss.item(), "evaluated": evaluated, **metrics}, gradients


@pytest.fixture
def batch(rng: torch.Generator) -> dict[str, Any]:
    mask = (torch.arange(6) < torch.tensor([6, 3, 1, 5])[:, None]).long()
    prompt_mask = torch.ones(4, 3, dtype=torch.int64)
    prompt_mask[1, 0] = 0
    return {
        "prompt_ids": torch.randint(60, (4, 3), generator=rng),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(60, (4, 6), generator=rng),
        "completion_mask": mask,
        "advantages": torch.randn(4, generator=rng),
        "num_items_in_batch": torch.tensor(41),
        "old_per_token_logps": (0.3 * torch.randn(4, 6, generator=rng) - 5) * mask,
        "ref_per_token_logps": (0.3 * torch.randn(4, 6, generator=rng) - 5) * mask,
    }


def compare(folder: Path, inputs: dict[str, Any], options: dict[str, Any]) -> str | None:
    """Compare loss, metrics and gradients with TRL's; return our trainer's `fallback_reason`."""
    theirs, their_gradients = results_of(trainer_of(trl.GRPOTrainer, folder, **options), inputs)
    mine, before = trainer_of(FastGRPOTrainer, folder, **options), dict(vars(utils))
    ours, our_gradients = results_of(mine, inputs)
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)
    torch.testing.assert_close(our_gradients, their_gradients, rtol=1e-3, atol=1e-5)
    assert vars(utils) == before  # TRL's names are its own again
    return mine.fallback_reason


SEQUENCE = {"importance_sampling_level": "sequence"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss_type": "grpo", **SEQUENCE, "beta": 0.0}, None),
        ({"loss_type": "grpo", **SEQUENCE, "use_bias_correction_kl": False}, None),
        ({"loss_type": "dapo", "delta": 1.5, "epsilon": 0.1, "epsilon_high": 0.3}, None),
        ({"loss_type": "bnpo", "top_entropy_quantile": 0.4}, None),
        ({"loss_type": "grpo", "off_policy_mask_threshold": 0.05}, None),
        ({"loss_type": "dr_grpo", "temperature": 0.6}, None),
        ({"loss_type": "cispo", "cast_lm_head_to_fp32": True, "epsilon_high": 2.0}, None),
        ({"entropy_coef": 0.01}, "the entropy bonus"),
        ({"loss_type": "cispo", **SEQUENCE, "beta": 0.0}, "importance_sampling_level"),
        ({**SEQUENCE}, "use_bias_correction_kl"),
        ({"delta": 1.1}, "delta = 1.1"),
    ],
    ids=str,
)
def test_a_batch_has_trls_loss_metrics_and_gradients(options, reason, model_folder, batch, caplog):
    found = compare(model_folder, batch, {"beta": 0.1} | options)

    assert found is None if reason is None else found.startswith(reason)
    assert ("FastGRPOTrainer uses TRL's own loss: " + (reason or "") in caplog.text) == bool(reason)


@pytest.mark.parametrize(
    ("loss_type", "ratio"),
    [*((name, "token") for name in LOSS_TYPES), ("vespo", None), ("luspo", "sequence")],
)
def test_tools_empty_completions_and_a_samplers_ratio_enter_as_in_trl(
    loss_type, ratio, model_folder, batch, monkeypatch, rng
):
    batch["tool_mask"] = torch.ones(4, 6, dtype=torch.int64)
    batch["tool_mask"][0, 2:4] = batch["tool_mask"][2] = 0
    if ratio is not None:
        weights = torch.rand(4, 6 if ratio == "token" else 1, generator=rng) + 0.4
        weights[3] = 0
        live = batch["completion_mask"] * batch["tool_mask"] != 0
        batch["importance_sampling_ratio"] = torch.where(live, weights, 1) if ratio == "token" else weights
        make = trl.GRPOTrainer.__init__

        def with_sampler(self: Any, *arguments: Any, **options: Any) -> None:
            make(self, *arguments, **options)
            self.use_vllm, self.vllm_importance_sampling_correction = True, True

        monkeypatch.setattr(trl.GRPOTrainer, "__init__", with_sampler)

    options = {"loss_type": loss_type, "beta": 0.1, "epsilon_high": 1.2}
    reason = compare(model_folder, batch, options)

    assert (reason is None) == (ratio is None or loss_type != "vespo")


def test_a_batch_without_any_token_trains_nothing(model_folder, batch):
    batch |= {"completion_mask": torch.zeros(4, 6, dtype=torch.int64), "num_items_in_batch": torch.tensor(0)}

    results, gradients = results_of(trainer_of(FastGRPOTrainer, model_folder), batch)

    assert results["loss"] == 0
    assert not any(gradient is not None and gradient.any() for gradient in gradients.values())
