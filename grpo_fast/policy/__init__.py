"""The policy: loading, packing, the forward to hidden states, the optimizer, export."""

from typing import TYPE_CHECKING

from grpo_fast.config.lookup import lazy_names

__all__ = [
    "PackedBatch",
    "Policy",
    "PolicyOptimizer",
    "load_image_reader",
    "load_policy",
    "load_tokenizer",
    "longest_sequence",
    "pack",
]

if TYPE_CHECKING:
    from grpo_fast.policy.architecture import longest_sequence
    from grpo_fast.policy.load import load_image_reader, load_policy, load_tokenizer
    from grpo_fast.policy.optimizer import PolicyOptimizer
    from grpo_fast.policy.packing import PackedBatch, pack
    from grpo_fast.policy.policy import Policy
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "architecture": ["longest_sequence"],
            "load": ["load_image_reader", "load_policy", "load_tokenizer"],
            "optimizer": ["PolicyOptimizer"],
            "packing": ["PackedBatch", "pack"],
            "policy": ["Policy"],
        },
    )
