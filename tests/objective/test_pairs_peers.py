"""Our losses of pairs against TRL 1.16 and Liger 0.8.5 themselves, called on the same random pairs.

Where a peer and the paper differ we follow the paper, and the test says so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.objective.pairs import PreferenceInputs, PreferenceLossConfig, preference_loss

TRL, LIGER = "pip install --no-deps trl==1.16.0", "pip install --no-deps liger-kernel==0.8.5"


def our_loss(inputs: PreferenceInputs, *loss: Any, **constants: Any) -> torch.Tensor:
    return preference_loss(inputs, PreferenceLossConfig(*loss, **constants)).loss


def per_token(inputs: PreferenceInputs) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = inputs.chosen_logprobs / inputs.chosen_lengths
    return chosen, inputs.rejected_logprobs / inputs.rejected_lengths


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
        zeros = dict.fromkeys(("entropy", "mean_logits", "log_sum_sq_probs"), blank)
        return SimpleNamespace(log_probs=self.logprobs, is_top1=blank.bool(), **zeros)


def trl_step(
    trainer_class: Any, inputs: PreferenceInputs, batch: dict[str, Any], **attributes: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """`_compute_loss` on an object that has just what it reads, and the metrics that it notes."""
    lengths = torch.cat([inputs.chosen_lengths, inputs.rejected_lengths])
    sums = torch.cat([inputs.chosen_logprobs, inputs.rejected_logprobs])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    model = Model(mask * (sums / lengths)[:, None])  # per token, adding up to the sums
    # A prompt token in front: the mask of the completion is shifted by one against the predictions.
    completion_mask = torch.cat([torch.zeros(len(lengths), 1, dtype=torch.bool), mask], dim=1).long()
    trainer = SimpleNamespace(
        model=model,
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        args=SimpleNamespace(),
        precompute_ref_logps=True,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **attributes,
    )
    ones = torch.ones_like(completion_mask)
    batch = {"input_ids": ones, "attention_mask": ones, "completion_mask": completion_mask, **batch}
    loss = trainer_class._compute_loss(trainer, model, batch, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def trl_dpo(inputs: PreferenceInputs, config: PreferenceLossConfig) -> tuple[torch.Tensor, dict[str, float]]:
    trl = pytest.importorskip("trl", reason=TRL)
    return trl_step(
        trl.DPOTrainer,
        inputs,
        {"ref_chosen_logps": inputs.ref_chosen_logprobs, "ref_rejected_logps": inputs.ref_rejected_logprobs},
        beta=config.beta,
        f_divergence_type="reverse_kl",
        label_smoothing=config.label_smoothing,
        ld_alpha=None,
        loss_types=list(config.loss_types),
        loss_weights=[weight for _, weight in config.objectives],
        use_weighting=False,
    )


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
def test_trls_dpo_trainer_computes_the_same_loss_and_rewards(config, make_pairs, assert_same):
    inputs = make_pairs()
    ours, (theirs, metrics) = preference_loss(inputs, config), trl_dpo(inputs, config)
    assert_same(inputs, ours.loss, theirs)
    if config.loss_type == "sigmoid":
        rewards = [f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")]
        for name in (*rewards, "logps/chosen", "logps/rejected"):
            torch.testing.assert_close(ours.metrics[name].item(), metrics[name])


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "simpo"])
def test_trls_cpo_trainer_computes_the_same_preference_term(name, make_pairs, assert_same):
    module = pytest.importorskip("trl.experimental.cpo", reason=TRL)
    inputs = make_pairs()
    smoothing = {} if name == "hinge" else {"label_smoothing": 0.1}
    constants = {"alpha": 0.0, "beta": 0.7, "loss_type": name, "label_smoothing": 0.0, "simpo_gamma": 0.9}
    trainer = SimpleNamespace(**constants | smoothing, accelerator=Accelerator())
    logprobs = per_token(inputs) if name == "simpo" else (inputs.chosen_logprobs, inputs.rejected_logprobs)
    theirs = module.CPOTrainer.cpo_loss(trainer, *logprobs)[0].mean()
    if name == "hinge":
        # TRL's hinge without a reference: ours with a reference that says nothing.
        blank = torch.zeros_like(inputs.chosen_lengths)
        inputs = replace(inputs, ref_chosen_logprobs=blank, ref_rejected_logprobs=blank)
    own = {"simpo": {"gamma": 0.9}, "sigmoid": {"cpo_alpha": 0.0}, "hinge": {}}[name]
    ours = our_loss(inputs, "cpo" if name == "sigmoid" else name, beta=0.7, **smoothing, **own)
    assert_same(inputs, ours, theirs)


def test_trls_orpo_trainer_computes_the_same_odds_ratio_term(make_pairs):
    """TRL's likelihood term differs: the mean over the batch's prompt and chosen tokens. We follow the paper
    (eq. 1 and 6): the mean over completions of the mean over their tokens."""
    module = pytest.importorskip("trl.experimental.orpo", reason=TRL)
    inputs = make_pairs()
    chosen, rejected = per_token(inputs)
    trainer = SimpleNamespace(beta=0.4, accelerator=Accelerator())
    theirs = -chosen.mean() - module.ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0].mean()
    # TRL computes in float32.
    torch.testing.assert_close(our_loss(inputs, "orpo", beta=0.4), theirs.double(), rtol=1e-6, atol=1e-6)


def test_trls_kto_trainer_computes_the_same_loss(make_pairs, assert_same):
    trl = pytest.importorskip("trl", reason=TRL)
    inputs = make_pairs(5, 3)
    mismatched = torch.linspace(-4.0, -1.0, 8, dtype=torch.float64)
    mismatched_reference = torch.linspace(-5.5, -1.5, 8, dtype=torch.float64)
    constants = {"beta": 0.25, "desirable_weight": 1.3, "undesirable_weight": 0.6}
    theirs, _ = trl_step(
        trl.KTOTrainer,
        inputs,
        {
            "label": torch.tensor([True] * 5 + [False] * 3),
            "ref_logps": torch.cat([inputs.ref_chosen_logprobs, inputs.ref_rejected_logprobs]),
            "ref_KL_logps": mismatched_reference,
        },
        calculate_KL=True,
        loss_type="kto",
        _compute_kl_logps=lambda *_: mismatched,
        **constants,
    )
    inputs = replace(inputs, kl=(mismatched - mismatched_reference).mean())
    assert_same(inputs, our_loss(inputs, "kto", **constants), theirs)


# ------------------------------------------------------------------------------------------------- Liger


def liger(name: str, *arguments: Any, **constants: Any) -> torch.Tensor:
    module = pytest.importorskip(f"liger_kernel.chunked_loss.{name}_loss", reason=LIGER)
    spelt = {"simpo": "SimPO"}.get(name, name.upper())
    result = getattr(module, f"LigerFusedLinear{spelt}Function").preference_loss_fn(*arguments, **constants)
    return result[0] if isinstance(result, tuple) else result


FULL = torch.empty(14, 1)  # the targets, of which Liger takes the count


@pytest.mark.parametrize(
    ("name", "constants"), [("sigmoid", {}), ("hinge", {}), ("robust", {"label_smoothing": 0.2})]
)
def test_ligers_dpo_computes_the_same_loss(name, constants, make_pairs, assert_same):
    inputs = make_pairs()
    logprobs, reference = (
        (getattr(inputs, f"{of}chosen_logprobs"), getattr(inputs, f"{of}rejected_logprobs"))
        for of in ("", "ref_")
    )
    theirs = liger("dpo", *logprobs, FULL, *reference, beta=0.3, loss_type=name, **constants)
    assert_same(inputs, our_loss(inputs, name, beta=0.3, **constants), theirs)


def test_ligers_losses_without_a_reference_are_the_same(make_pairs, assert_same):
    """Of CPO and ORPO Liger's function is the preference term."""
    inputs = make_pairs()
    summed, (chosen, rejected) = (inputs.chosen_logprobs, inputs.rejected_logprobs), per_token(inputs)

    simpo = liger("simpo", chosen, rejected, FULL, beta=2.0, gamma=0.8, label_smoothing=0.1)
    cpo = liger("cpo", *summed, FULL, beta=0.2, label_smoothing=0.1)
    orpo = liger("orpo", chosen, rejected, FULL, beta=0.5) - chosen.mean()

    assert_same(inputs, our_loss(inputs, "simpo", gamma=0.8, label_smoothing=0.1), simpo)
    assert_same(inputs, our_loss(inputs, "cpo", beta=0.2, label_smoothing=0.1, cpo_alpha=0.0), cpo)
    assert_same(inputs, our_loss(inputs, "orpo", beta=0.5), orpo)


def test_ligers_kto_computes_the_same_loss(make_pairs, assert_same):
    inputs = make_pairs(4, 6, kl=torch.tensor(0.3, dtype=torch.float64))
    theirs = liger(
        "kto",
        torch.cat([inputs.chosen_logprobs, inputs.rejected_logprobs]),
        torch.tensor([True] * 4 + [False] * 6),
        torch.empty(10),
        torch.cat([inputs.ref_chosen_logprobs, inputs.ref_rejected_logprobs]),
        beta=0.15,
        kl=inputs.kl,
    )
    assert_same(inputs, our_loss(inputs, "kto", beta=0.15), theirs)
