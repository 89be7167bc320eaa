"""The losses that the head's log-probabilities can end in: one definition, for the peers and the oracle.

In plain torch, so that no peer pays for the metrics of our own losses. A batch is S equally long sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

if TYPE_CHECKING:
    from .problem import Problem

LOGPROB, GRPO, CROSS_ENTROPY, DPO = LOSSES = ("logprob", "grpo", "cross_entropy", "dpo")
NAMES = {LOGPROB: "log-probabilities", GRPO: "GRPO", CROSS_ENTROPY: "cross-entropy", DPO: "DPO"}
CLIP, KL_BETA, DPO_BETA = 0.2, 0.04, 0.1

_NEAR, _FAR, _FAR_SHARE = 0.1, 0.4, 0.1
"""Log-ratios of the policy to the old one: at most `_NEAR`, or `_FAR` either way for a share of the tokens.
In between lies the clip; rounding must not decide on which side of it a token is."""
_REFERENCE_SPREAD = 0.1  # standard deviation of the log-ratio to the reference


def loss_of(problem: Problem, logprobs: Tensor) -> Tensor:
    """The problem's loss () of the targets' log-probabilities (N,)."""
    return _DEFINITIONS[problem.loss](problem, logprobs)


def old_and_reference(logprobs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Of log-probabilities (N,): (N,) those of a slightly older policy, and (N,) of a reference model."""
    kind = {"device": logprobs.device, "generator": generator}
    steps = 2 * torch.rand(logprobs.shape, **kind) - 1
    far = torch.rand(logprobs.shape, **kind) < _FAR_SHARE
    old = logprobs - torch.where(far, _FAR * steps.sign(), _NEAR * steps)
    return old, logprobs - _REFERENCE_SPREAD * torch.randn(logprobs.shape, **kind)


def _policy_gradient(problem: Problem, logprobs: Tensor) -> Tensor:
    """REINFORCE, and the gradient of GRPO exactly on-policy."""
    return -(problem.advantages * logprobs).mean()


def _grpo(problem: Problem, logprobs: Tensor) -> Tensor:
    """DeepSeekMath, arXiv 2402.03300, eq. 3 and 4; sequences of one length make its means one over tokens."""
    ratio = (logprobs - problem.old_logprobs).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.minimum(ratio * problem.advantages, clipped * problem.advantages)
    away = problem.ref_logprobs - logprobs
    return (KL_BETA * (torch.expm1(away) - away) - surrogate).mean()


def _cross_entropy(problem: Problem, logprobs: Tensor) -> Tensor:
    return -logprobs.mean()


def _dpo(problem: Problem, logprobs: Tensor) -> Tensor:
    """DPO, arXiv 2305.18290, eq. 7. Pair i is sequence i, chosen, and i + S/2, rejected.

    The reference's sums are the same for both of a pair, so that they cancel: Liger's fused loss takes none.
    """
    chosen, rejected = logprobs.view(2, problem.sequences // 2, -1).sum(2)
    return -logsigmoid(DPO_BETA * (chosen - rejected)).mean()


_DEFINITIONS = {LOGPROB: _policy_gradient, GRPO: _grpo, CROSS_ENTROPY: _cross_entropy, DPO: _dpo}
