"""Our losses of pairs against TRL 1.16 itself, called on the same random pairs."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.objective.pairs import PreferenceLossConfig, preference_loss

Loss = PreferenceLossConfig


class Accelerator:
    """What TRL's losses ask of accelerate: one process."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True

    def gather(self, values, *_, **__):
        return values

    gather_for_metrics = reduce = pad_across_processes = gather


def trls_step(inputs, config):
    """`DPOTrainer._compute_loss` on an object that has just what it reads, and the metrics that it notes."""
    trl = pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0")
    lengths = torch.cat([inputs.chosen_lengths, inputs.rejected_lengths])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    summed = torch.cat([inputs.chosen_logprobs, inputs.rejected_logprobs])
    logprobs = mask * (summed / lengths)[:, None]  # per token, adding up to the sums
    blank = torch.zeros_like(logprobs)

    def model(**_):  # as TRL's fused head
        zeros = dict.fromkeys(("entropy", "mean_logits", "log_sum_sq_probs"), blank)
        return SimpleNamespace(log_probs=logprobs, is_top1=blank.bool(), **zeros)

    model.training = True
    trainer = SimpleNamespace(
        model=model,
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        args=SimpleNamespace(),
        precompute_ref_logps=True,
        beta=config.beta,
        f_divergence_type="reverse_kl",
        label_smoothing=config.label_smoothing,
        ld_alpha=None,
        loss_types=list(config.loss_types),
        loss_weights=[weight for _, weight in config.objectives],
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    # A prompt token in front: the mask of the completion is shifted by one against the predictions.
    completion_mask = torch.cat([torch.zeros(len(lengths), 1, dtype=torch.bool), mask], dim=1).long()
    ones = torch.ones_like(completion_mask)
    batch = {"input_ids": ones, "attention_mask": ones, "completion_mask": completion_mask}
    batch |= {f"ref_{side}_logps": getattr(inputs, f"ref_{side}_logprobs") for side in ("chosen", "rejected")}
    loss = trl.DPOTrainer._compute_loss(trainer, model, batch, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize(
    "config",
    [
        Loss("sigmoid"),
        Loss("hinge", beta=0.3),
        Loss("ipo", beta=0.2),
        Loss("robust", label_smoothing=0.15),
        Loss("sft"),
        Loss(("sigmoid", "sft"), loss_weights=(0.8, 0.2), beta=0.25),
    ],
    ids=lambda config: "+".join(config.loss_types),
)
def test_trls_dpo_trainer_computes_the_same_loss_and_rewards(config, make_pairs, assert_same):
    inputs = make_pairs()
    theirs, metrics = trls_step(inputs, config)
    ours = preference_loss(inputs, config)
    assert_same(inputs, ours.loss, theirs)
    if config.loss_type == "sigmoid":
        rewards = [f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")]
        for name in (*rewards, "logps/chosen", "logps/rejected"):
            torch.testing.assert_close(ours.metrics[name].item(), metrics[name])
