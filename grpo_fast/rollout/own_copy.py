"""The transformers engine of mode `shard`: with weights of its own, for the policy's are rows."""

from __future__ import annotations

import copy
from typing import Any

import torch

from grpo_fast.policy import Policy
from grpo_fast.policy.random_state import capture_rng, restore_rng
from grpo_fast.rollout.transformers import TransformersEngine


class OwnCopyEngine(TransformersEngine):
    """Generates with a copy of the whole model, adapters merged: filled in `sync`, freed in `sleep`.

    Args:
        policy: sharded. All ranks `sync` together; each generates by itself.
        max_batch_tokens: as `TransformersEngine`.
    """

    def __init__(self, policy: Policy, *, max_batch_tokens: int | None = None) -> None:
        like: Any = policy.base_model
        random_state = capture_rng()
        with torch.device(policy.device):
            model = type(like)._from_config(copy.deepcopy(like.config), dtype=like.dtype)
        restore_rng(random_state)
        super().__init__(
            model.requires_grad_(False),
            policy.tokenizer,
            eos_ids=policy.eos_token_ids,
            max_batch_tokens=max_batch_tokens,
        )
        self._policy = policy
        self._weights = {n: t.detach() for n, t in Policy(model, policy.tokenizer).base_weights().items()}
        self.sleep()

    def sleep(self) -> None:
        super().sleep()
        for weight in self._weights.values():
            weight.untyped_storage().resize_(0)

    def sync(self, policy: Policy) -> None:
        """Take over the policy's weights, all ranks together."""
        if policy is not self._policy:
            raise ValueError("sync() got another policy than the one that this engine was made with")
        for own in self._weights.values():  # first: a rank without room asks again while the others wait
            own.untyped_storage().resize_(own.nbytes)
        for name, weight in policy.named_weights():
            self._weights[name].copy_(weight)

    def wake(self) -> None:
        if self.freed():
            raise RuntimeError("the engine has dropped its weights; sync() before wake()")
        super().wake()

    def memory(self) -> dict[str, int]:
        held = sum(weight.nbytes for weight in self._weights.values()) - self.freed()
        return {"weights": held} | super().memory()

    def freed(self) -> int:
        return sum(
            weight.nbytes for weight in self._weights.values() if not weight.untyped_storage().nbytes()
        )
