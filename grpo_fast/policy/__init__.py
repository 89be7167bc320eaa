"""The policy: loading, packing, the forward to hidden states, the optimiser, export."""

from grpo_fast.head import HeadParameters
from grpo_fast.policy.architecture import head_parameters
from grpo_fast.policy.load import load_policy, load_tokenizer
from grpo_fast.policy.optimizer import PolicyOptimizer
from grpo_fast.policy.packing import PackedBatch, Sample, pack
from grpo_fast.policy.policy import Policy

__all__ = [
    "HeadParameters",
    "PackedBatch",
    "Policy",
    "PolicyOptimizer",
    "Sample",
    "head_parameters",
    "load_policy",
    "load_tokenizer",
    "pack",
]
