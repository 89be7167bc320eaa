"""`FastGRPOTrainer` against TRL's own: losses, gradients, metrics, fallbacks, two processes, examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

trl = pytest.importorskip("trl", reason="pip install --no-deps 'trl~=1.16.0'")
if trl.__version__.split(".")[:2] != ["1", "16"]:
    pytest.skip("the side-by-side needs TRL 1.16, whose own head runs on CPU", allow_module_level=True)

from datasets import Dataset  # noqa: E402
from transformers import PreTrainedTokenizerFast, set_seed  # noqa: E402
from trl.trainer import utils  # noqa: E402

from benchmarks.trainers import small_words, words_task  # noqa: E402
from benchmarks.trl_side_by_side import Setting, differences, side_by_side, train  # noqa: E402
from grpo_fast.integrations.host_loss import LOSS_TYPES  # noqa: E402
from grpo_fast.integrations.trl import FastGRPOTrainer, patched  # noqa: E402

NOISE = 2e-5


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_five_steps_of_training_are_the_same_three_times(loss_type, lora, model_folder):
    """Gradient accumulation over two micro-batches, two optimiser steps a generation, KL, clipping."""
    runs = side_by_side(Setting(loss_type, lora), words_task(model_folder), steps=5)

    gaps = {name: differences(runs["TRL"].history, run.history) for name, run in runs.items()}

    print({name: max(gap.items(), key=lambda item: item[1]) for name, gap in gaps.items()})
    assert len(runs["TRL"].history) == 5
    assert max(gaps["patched"].values()) < NOISE
    assert max(gaps["FastGRPOTrainer"].values()) < NOISE


def test_a_second_iteration_needs_no_scoring_before_the_first(model_folder, monkeypatch):
    """The training forward of the first yields the old log-probabilities of the second."""
    scored = defaultdict(int)
    original = trl.GRPOTrainer._get_per_token_logps_and_entropies

    def counting(self: Any, *arguments: Any, **options: Any) -> Any:
        scored[type(self).__name__] += not options.get("compute_entropy")
        return original(self, *arguments, **options)

    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
    options = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.0}

    runs = side_by_side(Setting("dapo", options=options), words_task(model_folder), steps=4)

    assert max(differences(runs["TRL"].history, runs["FastGRPOTrainer"].history).values()) < NOISE
    assert scored == {"GRPOTrainer": 4}  # two generations each, unpatched and patched


def test_with_trls_choice_of_tied_tokens_training_on_high_entropies_is_the_same(model_folder, monkeypatch):
    """Ties at the quantile are all that sets a patched run apart from TRL's own.

    Completions of one prompt share the context of their first token, so its entropies tie by design, and a
    last digit decides which of them counts as high.
    """
    setting, task = Setting("dapo", True, options={"top_entropy_quantile": 0.5}), words_task(model_folder)
    choose, chosen, gaps = trl.GRPOTrainer.get_high_entropy_mask, [], []

    def record(self: Any, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        chosen.append(choose(self, entropies, mask, threshold))
        return chosen[-1]

    def replay(self: Any, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        trls, ours = chosen.pop(0), choose(self, entropies, mask, threshold)
        quantile = entropies[mask.bool()].quantile(threshold)
        gaps.append(((entropies - quantile).abs() * (trls != ours)).max())
        return trls

    monkeypatch.setattr(trl.GRPOTrainer, "get_high_entropy_mask", record)
    theirs = train(setting, trl.GRPOTrainer, task, steps=8)
    monkeypatch.setattr(trl.GRPOTrainer, "get_high_entropy_mask", replay)
    with patched():
        mine = train(setting, trl.GRPOTrainer, task, steps=8)

    assert max(differences(theirs.history, mine.history).values()) < NOISE
    assert len(gaps) == 16 and max(gaps) < NOISE


def trainer_of(kind: type, folder: Path, output: Path, **options: Any) -> Any:
    set_seed(3)
    built = kind(
        model=str(folder),
        reward_funcs=small_words,
        args=trl.GRPOConfig(
            output_dir=str(output),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4,
            num_generations=4,
            report_to=[],
            max_completion_length=6,
            gradient_accumulation_steps=2,
            steps_per_generation=4,
            **options,
        ),
        train_dataset=Dataset.from_list([{"prompt": "w1"}] * 4),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )
    built.current_gradient_accumulation_steps = 2
    return built


def loss_of(trainer: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Loss and metrics, and gradients."""
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    loss.backward()
    metrics = {name: value for name, (value,) in trainer._metrics["train"].items()}
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    return {"loss": loss.item(), **metrics}, gradients


@pytest.fixture
def make_batch(rng: torch.Generator):
    def make(**extra: Any) -> dict[str, Any]:
        completion_mask = (torch.arange(6) < torch.tensor([6, 3, 1, 5])[:, None]).long()
        prompt_mask = torch.ones(4, 3, dtype=torch.int64)
        prompt_mask[1, 0] = 0
        return {
            "prompt_ids": torch.randint(60, (4, 3), generator=rng),
            "prompt_mask": prompt_mask,
            "completion_ids": torch.randint(60, (4, 6), generator=rng),
            "completion_mask": completion_mask,
            "advantages": torch.randn(4, generator=rng),
            "num_items_in_batch": torch.tensor(41),
            "old_per_token_logps": (0.3 * torch.randn(4, 6, generator=rng) - 5) * completion_mask,
            "ref_per_token_logps": (0.3 * torch.randn(4, 6, generator=rng) - 5) * completion_mask,
            **extra,
        }

    return make


CONFIGURATIONS = {
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
    "GSPO, plain KL": {"use_bias_correction_kl": False, "loss_type": "grpo", "beta": 0.1}
    | {"importance_sampling_level": "sequence"},
    "LUSPO on tokens": {"loss_type": "luspo", "beta": 0.1},
    "two-sided clip": {"loss_type": "dapo", "delta": 1.5, "epsilon": 0.1, "epsilon_high": 0.3},
    "high entropies only": {"loss_type": "bnpo", "top_entropy_quantile": 0.4},
    "off-policy mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
    "temperature": {"loss_type": "dr_grpo", "temperature": 0.6},
    "head in float32": {"loss_type": "cispo", "cast_lm_head_to_fp32": True, "epsilon_high": 2.0},
    "SAPO": {"loss_type": "sapo", "beta": 0.1},
    "VESPO": {"loss_type": "vespo", "beta": 0.1},
}


def compare(folder: Path, output: Path, inputs: dict[str, Any], options: dict[str, Any]) -> Any:
    """Our trainer, after its loss, metrics and gradients were found to be TRL's."""
    theirs, their_gradients = loss_of(trainer_of(trl.GRPOTrainer, folder, output, **options), inputs)
    mine = trainer_of(FastGRPOTrainer, folder, output, **options)
    ours, our_gradients = loss_of(mine, inputs)
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)
    torch.testing.assert_close(our_gradients, their_gradients, rtol=1e-3, atol=1e-5)
    return mine


@pytest.mark.parametrize("case", list(CONFIGURATIONS))
def test_loss_metrics_and_gradients_of_a_batch_are_trls(case, model_folder, tmp_path, make_batch):
    mine = compare(model_folder, tmp_path, make_batch(), CONFIGURATIONS[case])

    assert mine.fallback_reason is None


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tokens_of_tools_and_empty_completions_stay_out_of_the_loss(
    loss_type, model_folder, tmp_path, make_batch
):
    tool_mask = torch.ones(4, 6, dtype=torch.int64)
    tool_mask[0, 2:4] = tool_mask[2] = 0
    batch = make_batch(tool_mask=tool_mask)

    mine = compare(model_folder, tmp_path, batch, {"loss_type": loss_type, "beta": 0.1})

    assert mine.fallback_reason is None


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_a_batch_without_any_token_trains_nothing(loss_type, model_folder, tmp_path, make_batch):
    batch = make_batch(
        completion_mask=torch.zeros(4, 6, dtype=torch.int64), num_items_in_batch=torch.tensor(0)
    )

    results, gradients = loss_of(
        trainer_of(FastGRPOTrainer, model_folder, tmp_path, loss_type=loss_type), batch
    )

    assert results["loss"] == 0
    assert not any(gradient is not None and gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("per", ["token", "sequence"])
def test_a_samplers_ratio_corrects_as_in_trl(
    loss_type, per, model_folder, tmp_path, make_batch, monkeypatch, rng
):
    if loss_type == "vespo" and per == "sequence":
        return  # TRL refuses it
    batch = make_batch()
    ratio = torch.rand(4, 6 if per == "token" else 1, generator=rng) + 0.4
    ratio[3] = 0
    batch["importance_sampling_ratio"] = (
        ratio if per == "sequence" else torch.where(batch["completion_mask"] != 0, ratio, 1)
    )
    original = trl.GRPOTrainer.__init__

    def with_sampler(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.use_vllm, self.vllm_importance_sampling_correction = True, True

    monkeypatch.setattr(trl.GRPOTrainer, "__init__", with_sampler)

    mine = compare(model_folder, tmp_path, batch, {"loss_type": loss_type, "beta": 0.1})

    assert mine.fallback_reason is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"entropy_coef": 0.01}, "the entropy bonus"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"delta": 1.1}, "delta = 1.1"),
    ],
)
def test_what_is_not_computed_as_trl_does_runs_through_trls_own_loss_and_says_why(
    options, reason, model_folder, tmp_path, make_batch, caplog
):
    mine = compare(model_folder, tmp_path, make_batch(), options)

    assert mine.fallback_reason.startswith(reason)
    assert f"FastGRPOTrainer uses TRL's own loss: {reason}" in caplog.text


def test_evaluation_is_the_same(model_folder, tmp_path, make_batch):
    batch, losses = make_batch(), []
    for kind in (trl.GRPOTrainer, FastGRPOTrainer):
        trainer = trainer_of(kind, model_folder, tmp_path, loss_type="dapo", beta=0.1)
        trainer.model.eval()
        with torch.no_grad():
            losses.append(trainer.compute_loss(trainer.model, dict(batch)).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_trls_names_are_its_own_again_after_a_loss(model_folder, tmp_path, make_batch):
    before = dict(vars(utils))

    loss_of(trainer_of(FastGRPOTrainer, model_folder, tmp_path), make_batch())

    assert {name: value for name, value in vars(utils).items() if before.get(name) is not value} == {}


def test_two_processes_under_ddp_and_fsdp2_normalise_by_the_tokens_of_both(model_folder, run_worker):
    run_worker("trl_worker.py", model_folder)


@pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="pip install --no-deps deepspeed hjson msgpack ninja nvidia-ml-py; compiles on its first start",
)
def test_zero3_gathers_the_head_for_our_forward_and_for_its_backward(model_folder, run_worker):
    """Loss and gradients of two partitioned halves are those of one whole model."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run_worker("zero3_worker.py", model_folder, launcher=torchrun)


@pytest.mark.parametrize("name", ["trl_patch", "trl_trainer"])
def test_the_example_trains_as_it_stands(name: str, run_example: Callable[[str], Any]):
    names, _ = run_example(name)

    assert names["trainer"].state.global_step == 4
    assert getattr(names["trainer"], "fallback_reason", None) is None
