"""Our preference losses against TRL 1.16 and Liger 0.8.5 themselves, called on the same random pairs.

Where a peer and the paper differ we follow the paper, and the test says so.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.objective.pairs import PreferenceInputs, PreferenceLossConfig, preference_loss


def assert_same(inputs: PreferenceInputs, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal losses, and equal gradients in the log-probabilities."""
    leaves = (inputs.chosen_logprobs, inputs.rejected_logprobs)

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]

    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-9, atol=1e-12)
    for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(mine, other.to(mine.dtype), rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------------------------------- TRL


class Accelerator:
    """One process."""

    device = torch.device("cpu")

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    gather_for_metrics = gather


class Model:
    """Gives back fixed per-token log-probabilities, as TRL's fused head does."""

    training = True

    def __init__(self, logprobs: torch.Tensor) -> None:
        self.logprobs = logprobs

    def __call__(self, **_: Any) -> SimpleNamespace:
        blank = torch.zeros_like(self.logprobs)
        return SimpleNamespace(
            log_probs=self.logprobs,
            entropy=blank,
            mean_logits=blank,
            is_top1=blank.bool(),
            log_sum_sq_probs=blank,
        )


def spread(sums: torch.Tensor, lengths: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token log-probabilities that add up to `sums`, and the mask of the tokens."""
    mask = torch.arange(width)[None, :] < lengths[:, None]
    return mask * (sums / lengths)[:, None], mask


def trl_dpo(inputs: PreferenceInputs, config: PreferenceLossConfig) -> torch.Tensor:
    """`DPOTrainer._compute_loss` on an object that has just what it reads."""
    trl = pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0")
    lengths = torch.cat([inputs.chosen_lengths, inputs.rejected_lengths])
    sums = torch.cat([inputs.chosen_logprobs, inputs.rejected_logprobs])
    logprobs, mask = spread(sums, lengths, int(lengths.max()))
    model = Model(logprobs)
    # A prompt token in front: the mask of the completion is shifted by one against the predictions.
    completion_mask = torch.cat([torch.zeros(len(lengths), 1, dtype=torch.bool), mask], dim=1).long()
    trainer = SimpleNamespace(
        model=model,
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        args=SimpleNamespace(),
        beta=config.beta,
        f_divergence_type="reverse_kl",
        label_smoothing=config.label_smoothing,
        ld_alpha=None,
        loss_types=list(config.loss_types),
        loss_weights=list(config.loss_weights or [1.0] * len(config.loss_types)),
        precompute_ref_logps=True,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    batch = {
        "input_ids": torch.ones_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "ref_chosen_logps": inputs.ref_chosen_logprobs,
        "ref_rejected_logps": inputs.ref_rejected_logprobs,
    }
    loss = trl.DPOTrainer._compute_loss(trainer, model, batch, False)
    trainer_metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    loss.metrics = trainer_metrics
    return loss


@pytest.mark.parametrize(
    "config",
    [
        PreferenceLossConfig("sigmoid"),
        PreferenceLossConfig("hinge", beta=0.3),
        PreferenceLossConfig("ipo", beta=0.2),
        PreferenceLossConfig("robust", label_smoothing=0.15),
        PreferenceLossConfig("aot", label_smoothing=0.1),
        PreferenceLossConfig("aot_unpaired"),
        PreferenceLossConfig("sft"),
        PreferenceLossConfig(("sigmoid", "sft"), loss_weights=(0.8, 0.2), beta=0.25),
    ],
    ids=lambda config: "+".join(config.loss_types),
)
def test_trls_dpo_trainer_computes_the_same_loss(config, make_pairs):
    inputs = make_pairs()
    assert_same(inputs, preference_loss(inputs, config).loss, trl_dpo(inputs, config))


def test_trls_dpo_trainer_reports_the_same_rewards(make_pairs):
    inputs = make_pairs()
    config = PreferenceLossConfig("sigmoid", beta=0.3)
    theirs = trl_dpo(inputs, config).metrics
    ours = preference_loss(inputs, config).metrics
    for name in ("chosen", "rejected", "accuracies", "margins"):
        torch.testing.assert_close(ours[f"rewards/{name}"].item(), theirs[f"rewards/{name}"])
    for name in ("chosen", "rejected"):
        torch.testing.assert_close(ours[f"logps/{name}"].item(), theirs[f"logps/{name}"])


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "simpo"])
def test_trls_cpo_trainer_computes_the_same_preference_term(name, make_pairs):
    module = pytest.importorskip("trl.experimental.cpo", reason="pip install --no-deps trl==1.16.0")
    inputs = make_pairs()
    smoothing = 0.0 if name == "hinge" else 0.1
    trainer = SimpleNamespace(
        alpha=0.0,
        beta=0.7,
        loss_type=name,
        label_smoothing=smoothing,
        simpo_gamma=0.9,
        accelerator=Accelerator(),
    )
    chosen, rejected = inputs.chosen_logprobs, inputs.rejected_logprobs
    if name == "simpo":
        chosen, rejected = chosen / inputs.chosen_lengths, rejected / inputs.rejected_lengths
    theirs = module.CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean()
    if name == "simpo":
        ours = PreferenceLossConfig("simpo", beta=0.7, gamma=0.9, label_smoothing=0.1)
    elif name == "sigmoid":
        ours = PreferenceLossConfig("cpo", beta=0.7, label_smoothing=0.1, cpo_alpha=0.0)
    else:
        # TRL's hinge and ipo without a reference: ours with a reference that says nothing.
        ours = PreferenceLossConfig("hinge", beta=0.7)
        blank = torch.zeros_like(inputs.chosen_lengths)
        inputs = PreferenceInputs(
            inputs.chosen_logprobs,
            inputs.rejected_logprobs,
            inputs.chosen_lengths,
            inputs.rejected_lengths,
            blank,
            blank,
        )
    assert_same(inputs, preference_loss(inputs, ours).loss, theirs)


def test_trls_orpo_trainer_computes_the_same_odds_ratio_term(make_pairs):
    """TRL's likelihood term differs: the mean over the batch's prompt and chosen tokens. We follow the paper
    (eq. 1 and 6): the mean over completions of the mean over their tokens."""
    module = pytest.importorskip("trl.experimental.orpo", reason="pip install --no-deps trl==1.16.0")
    inputs = make_pairs()
    trainer = SimpleNamespace(beta=0.4, accelerator=Accelerator())
    chosen = inputs.chosen_logprobs / inputs.chosen_lengths
    rejected = inputs.rejected_logprobs / inputs.rejected_lengths
    theirs = -chosen.mean() - module.ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0].mean()
    ours = preference_loss(inputs, PreferenceLossConfig("orpo", beta=0.4)).loss
    # TRL computes in float32.
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=1e-6)


def test_trls_kto_trainer_computes_the_same_loss(make_pairs):
    trl = pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0")
    inputs = make_pairs(5, 3)
    labels = torch.tensor([True] * 5 + [False] * 3)
    lengths = torch.cat([inputs.chosen_lengths, inputs.rejected_lengths])
    sums = torch.cat([inputs.chosen_logprobs, inputs.rejected_logprobs])
    logprobs, mask = spread(sums, lengths, int(lengths.max()))
    completion_mask = torch.cat([torch.zeros(8, 1, dtype=torch.bool), mask], dim=1).long()
    mismatched = torch.linspace(-4.0, -1.0, 8, dtype=torch.float64)
    mismatched_reference = torch.linspace(-5.5, -1.5, 8, dtype=torch.float64)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        args=SimpleNamespace(),
        aux_loss_enabled=False,
        beta=0.25,
        calculate_KL=True,
        desirable_weight=1.3,
        undesirable_weight=0.6,
        loss_type="kto",
        precompute_ref_logps=True,
        _compute_kl_logps=lambda *_: mismatched,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    batch = {
        "input_ids": torch.ones_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "label": labels,
        "ref_logps": torch.cat([inputs.ref_chosen_logprobs, inputs.ref_rejected_logprobs]),
        "ref_KL_logps": mismatched_reference,
    }
    theirs = trl.KTOTrainer._compute_loss(trainer, Model(logprobs), batch, False)

    kl = (mismatched - mismatched_reference).mean()
    config = PreferenceLossConfig("kto", beta=0.25, desirable_weight=1.3, undesirable_weight=0.6)
    inputs = PreferenceInputs(**{**vars(inputs), "kl": kl})
    assert_same(inputs, preference_loss(inputs, config).loss, theirs)


# ------------------------------------------------------------------------------------------------- Liger


def liger(name: str) -> Any:
    module = pytest.importorskip(
        f"liger_kernel.chunked_loss.{name}_loss", reason="pip install --no-deps liger-kernel==0.8.5"
    )
    spelt = {"dpo": "DPO", "cpo": "CPO", "simpo": "SimPO", "orpo": "ORPO", "kto": "KTO"}[name]
    return getattr(module, f"LigerFusedLinear{spelt}Function").preference_loss_fn


def liger_loss(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize(("name", "smoothing"), [("sigmoid", 0.0), ("hinge", 0.0), ("robust", 0.2)])
def test_ligers_dpo_computes_the_same_loss(name, smoothing, make_pairs):
    inputs = make_pairs()
    theirs = liger("dpo")(
        inputs.chosen_logprobs,
        inputs.rejected_logprobs,
        torch.empty(14, 1),
        inputs.ref_chosen_logprobs,
        inputs.ref_rejected_logprobs,
        beta=0.3,
        loss_type=name,
        label_smoothing=smoothing,
    )
    config = PreferenceLossConfig(name, beta=0.3, label_smoothing=smoothing)
    assert_same(inputs, preference_loss(inputs, config).loss, liger_loss(theirs))


def test_ligers_simpo_computes_the_same_loss(make_pairs):
    inputs = make_pairs()
    chosen = inputs.chosen_logprobs / inputs.chosen_lengths
    rejected = inputs.rejected_logprobs / inputs.rejected_lengths
    theirs = liger("simpo")(chosen, rejected, torch.empty(14, 1), beta=2.0, gamma=0.8, label_smoothing=0.1)
    config = PreferenceLossConfig("simpo", gamma=0.8, label_smoothing=0.1)
    assert_same(inputs, preference_loss(inputs, config).loss, liger_loss(theirs))


def test_ligers_cpo_computes_the_same_preference_term(make_pairs):
    inputs = make_pairs()
    theirs = liger("cpo")(
        inputs.chosen_logprobs, inputs.rejected_logprobs, torch.empty(14, 1), beta=0.2, label_smoothing=0.1
    )
    config = PreferenceLossConfig("cpo", beta=0.2, label_smoothing=0.1, cpo_alpha=0.0)
    assert_same(inputs, preference_loss(inputs, config).loss, liger_loss(theirs))


def test_ligers_orpo_computes_the_same_odds_ratio_term(make_pairs):
    inputs = make_pairs()
    chosen = inputs.chosen_logprobs / inputs.chosen_lengths
    rejected = inputs.rejected_logprobs / inputs.rejected_lengths
    theirs = liger_loss(liger("orpo")(chosen, rejected, torch.empty(14, 1), beta=0.5)) - chosen.mean()
    assert_same(inputs, preference_loss(inputs, PreferenceLossConfig("orpo", beta=0.5)).loss, theirs)


def test_ligers_kto_computes_the_same_loss(make_pairs):
    inputs = make_pairs(4, 6, kl=torch.tensor(0.3, dtype=torch.float64))
    theirs = liger("kto")(
        torch.cat([inputs.chosen_logprobs, inputs.rejected_logprobs]),
        torch.tensor([True] * 4 + [False] * 6),
        torch.empty(10),
        torch.cat([inputs.ref_chosen_logprobs, inputs.ref_rejected_logprobs]),
        beta=0.15,
        kl=inputs.kl,
    )
    assert_same(
        inputs, preference_loss(inputs, PreferenceLossConfig("kto", beta=0.15)).loss, liger_loss(theirs)
    )
