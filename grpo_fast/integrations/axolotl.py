"""Axolotl: log-probabilities and entropies of its GRPO trainers without logits.

Call `patch()` in the training process before it trains, for instance from a plugin's `pre_model_load`. Losses
stay Axolotl's. With `trl.use_liger_loss: true` the synchronous trainer keeps the chunked head of TRL.
"""

from __future__ import annotations

from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import Replacements, score_in_method

_patch = Replacements()
_ASYNC = (
    "_get_per_token_logps_and_entropies",
    "_get_per_token_logps_flattened",
    "_get_per_token_logps_and_entropies_flattened",
)


def patch() -> None:
    """Score tokens with our head in Axolotl's synchronous and asynchronous GRPO trainers. Idempotent."""
    synchronous = private("axolotl", "core.trainers.grpo.trainer").GRPOTrainer  # TRL's own
    asynchronous = private("axolotl", "core.trainers.grpo.async_trainer").AsyncGRPOTrainer
    unpatch()
    score_in_method(_patch, synchronous, "_full_logits_logps")
    for name in _ASYNC:
        score_in_method(_patch, asynchronous, name)


unpatch = _patch.close
