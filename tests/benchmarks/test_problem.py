"""The benchmark's losses are those of the package, and no token of them hangs on rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.problem import CLIP, DPO, DPO_BETA, GRPO, KL_BETA, Problem, Setting, loss_of
from benchmarks.rows import make_problem
from grpo_fast.objective import GRPOLossConfig, LossInputs, policy_loss
from grpo_fast.objective.pairs import PreferenceInputs, PreferenceLossConfig, preference_loss


def make(loss: str, seed: int, tokens: int = 64) -> tuple[Problem, Tensor]:
    """A problem, and its log-probabilities (N,) in float64 as a leaf."""
    setting = Setting("flat", tokens, 16, 50, "forward_backward", True, "float32", loss)
    problem = make_problem(setting, torch.device("cpu"), seed)
    logits = (problem.hidden @ problem.weight.T).detach().double()
    logprobs = logits.log_softmax(1).gather(1, problem.targets[:, None]).squeeze(1)
    return problem, logprobs.requires_grad_()


def packages_grpo(problem: Problem, logprobs: Tensor) -> Tensor:
    inputs = LossInputs(
        logprobs=logprobs,
        advantages=problem.advantages,
        sequence_ids=torch.arange(problem.sequences).repeat_interleave(64 // problem.sequences),
        loss_mask=torch.ones(64, dtype=torch.bool),
        num_sequences=problem.sequences,
        old_logprobs=problem.old_logprobs,
        ref_logprobs=problem.ref_logprobs,
    )
    config = GRPOLossConfig(loss_type="grpo", epsilon_low=CLIP, epsilon_high=CLIP, beta=KL_BETA)
    return policy_loss(inputs, config).loss


def packages_dpo(problem: Problem, logprobs: Tensor) -> Tensor:
    """With a reference that likes both of a pair equally."""
    chosen, rejected = logprobs.view(problem.sequences, -1).sum(1).chunk(2)
    lengths = torch.full((problem.sequences // 2,), 64 // problem.sequences)
    reference = torch.randn(problem.sequences // 2, dtype=torch.float64)
    inputs = PreferenceInputs(chosen, rejected, lengths, lengths, reference, reference)
    return preference_loss(inputs, PreferenceLossConfig(loss_type="sigmoid", beta=DPO_BETA)).loss


@pytest.mark.parametrize(("loss", "packages"), [(GRPO, packages_grpo), (DPO, packages_dpo)])
def test_a_loss_and_its_gradient_are_the_packages(loss, packages, seed):
    """To float64's rounding and that of the float32 constants' products."""
    problem, logprobs = make(loss, seed)

    found, expected = loss_of(problem, logprobs), packages(problem, logprobs)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    gradients = [torch.autograd.grad(loss, logprobs)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)


def test_grpo_is_slightly_off_policy_with_no_token_near_its_clip(seed):
    problem, logprobs = make(GRPO, seed, tokens=1024)

    ratio = (logprobs.detach() - problem.old_logprobs).exp()

    clipped = (ratio - 1).abs() > CLIP
    assert (((ratio - 1).abs() - CLIP).abs() > 0.05).all()
    assert 0.04 < clipped.double().mean() < 0.17  # a tenth ± 6 standard deviations
    assert (ratio[clipped] > 1).any() and (ratio[clipped] < 1).any()
    assert (logprobs - problem.ref_logprobs).abs().mean() > 0.05
