"""High-entropy tokens and the controller of the entropy bonus."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.objective import GRPOLossConfig, policy_loss
from grpo_fast.objective.entropy import EntropyController, entropy_threshold


@pytest.mark.parametrize("quantile", [0.0, 0.01, 0.2, 0.5, 0.9, 1.0])
def test_the_threshold_is_the_quantile_of_the_tokens_that_count(quantile: float, make_batch):
    inputs = make_batch().inputs()
    entropy = inputs.entropy.detach()

    threshold = entropy_threshold(entropy, inputs.loss_mask, quantile)

    assert threshold == pytest.approx(torch.quantile(entropy[inputs.loss_mask], 1 - quantile).item())
    assert entropy_threshold(entropy, torch.zeros_like(inputs.loss_mask), quantile) == float("inf")


def test_quantile_zero_keeps_the_one_token_of_highest_entropy(make_batch):
    batch = make_batch()
    batch.advantages[:] = 1.0
    config = GRPOLossConfig("reinforce", top_entropy_quantile=0.0)

    outputs = policy_loss(batch.inputs(), config)
    gradient = torch.autograd.grad(outputs.loss, batch.logprobs)[0]

    assert outputs.metrics["policy/masked_mean"].item() == pytest.approx(1 - 1 / batch.mask.sum().item())
    highest = batch.entropy.detach().masked_fill(~batch.mask, -1.0).argmax()
    assert gradient.flatten().nonzero().flatten().tolist() == [highest.item()]


def test_the_controller_raises_its_weight_while_entropy_is_low_and_goes_on_where_it_was_saved():
    controller = EntropyController.of(
        GRPOLossConfig(
            use_adaptive_entropy=True,
            entropy_coef=0.05,
            entropy_target=1.0,
            entropy_coef_delta=0.1,
            entropy_coef_min=0.02,
            entropy_coef_max=0.15,
        )
    )
    history = [controller.active_coef]

    for entropy in (0.5, 0.5, 1.0, 2.0, 0.9, 3.0, 3.0):
        controller.update(entropy)
        history.append(controller.active_coef)
        restored = EntropyController.of(controller.config)
        restored.load_state_dict(controller.state_dict())
        assert restored == controller
        controller = restored

    # Up by 0.1 to the ceiling of 0.15; a step above the target takes 0.1 off and switches the bonus off.
    assert history == pytest.approx([0.0, 0.15, 0.15, 0.15, 0.0, 0.15, 0.0, 0.0])
    assert controller.coef == 0.02
