"""ms-swift: log-probabilities and entropies of its GRPO trainer without logits.

Call `patch()` in the training process before it trains, for instance in a file for `--external_plugins`.
Losses stay ms-swift's. With `--sequence_parallel_size` above 1 ms-swift scores logits as before, and
`--use_liger_kernel true` takes Liger's loss.
"""

from __future__ import annotations

from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import Replacements, score_in_method

_patch = Replacements()


def patch() -> None:
    """Score tokens with our head in ms-swift's `GRPOTrainer`, padded and padding-free. Idempotent."""
    trainer = private("swift", "rlhf_trainers.grpo_trainer").GRPOTrainer
    unpatch()
    score_in_method(_patch, trainer, "_get_logps_via_local_forward")


unpatch = _patch.close
