"""The policy: loading, packing, the forward to hidden states, the optimiser, export."""

from grpo_fast.policy.load import load_policy, load_tokenizer
from grpo_fast.policy.optimizer import PolicyOptimizer
from grpo_fast.policy.packing import PackedBatch, Sample, pack
from grpo_fast.policy.policy import Policy

__all__ = [
    "PackedBatch",
    "Policy",
    "PolicyOptimizer",
    "Sample",
    "load_policy",
    "load_tokenizer",
    "pack",
]
