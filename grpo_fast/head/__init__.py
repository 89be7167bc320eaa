"""Hidden states to log-probabilities and losses, and back."""

from grpo_fast.head.api import linear_cross_entropy, linear_grpo_loss, linear_kl, linear_logprob
from grpo_fast.head.outputs import Certificate, GRPOLossOutput, HeadOutput, KLOutput
from grpo_fast.head.parameters import HeadParameters
from grpo_fast.head.warm_up import warm_up

__all__ = [
    "Certificate",
    "GRPOLossOutput",
    "HeadOutput",
    "HeadParameters",
    "KLOutput",
    "linear_cross_entropy",
    "linear_grpo_loss",
    "linear_kl",
    "linear_logprob",
    "warm_up",
]
