"""All patches of a model's forward, in the order in which they are applied.

Each wraps the existing forwards, so the first of `PATCHES` is the innermost. A backward therefore recomputes
a layer with its recurrent states and replayed experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from grpo_fast.config.policy import ModelConfig
from grpo_fast.policy.architecture import fix_rope
from grpo_fast.policy.layers import (
    compile_layers,
    recompute,
    resolve_compile,
    resolve_liger,
    tile_mlps,
    use_liger,
)
from grpo_fast.policy.recurrent import fork_states, keep_step_limits, recurrent_mixers

if TYPE_CHECKING:
    from grpo_fast.policy.routing import RoutingReplay


@dataclass(frozen=True)
class Setting:
    """Conditions of the patches."""

    config: ModelConfig
    device: torch.device  # where the model will be
    trains: bool = True  # false for a reference
    replay: RoutingReplay | None = None  # for `rollout.router_replay`

    def liger(self, model: Any) -> bool:
        return resolve_liger(self.config, self.device, model.config.model_type)

    def compiles(self, model: Any) -> bool:
        experts = any("expert" in name for name, _ in model.named_parameters())
        plain = not (experts or recurrent_mixers(model))
        return resolve_compile(self.config, self.device, liger=self.liger(model), plain=plain)


class Patch(NamedTuple):
    applies: Callable[[Any, Any], Any]  # of the model and the `Setting`
    apply: Callable[[Any, Any], None]


PATCHES = (
    Patch(lambda model, to: True, lambda model, to: keep_step_limits(model)),
    Patch(lambda model, to: True, lambda model, to: fix_rope(model, None)),
    Patch(lambda model, to: to.liger(model), lambda model, to: use_liger(model)),
    Patch(lambda model, to: recurrent_mixers(model), lambda model, to: fork_states(model)),
    Patch(lambda model, to: to.compiles(model), lambda model, to: compile_layers(model, to.config)),
    Patch(lambda model, to: to.replay, lambda model, to: to.replay.attach(model)),
    Patch(
        lambda model, to: to.config.recomputed,
        lambda model, to: tile_mlps(model, always=to.trains and to.config.recomputed == "mlp"),
    ),
    Patch(
        lambda model, to: to.trains and to.config.recomputed,
        lambda model, to: recompute(model, to.config.recomputed),
    ),
)


def apply_patches(model: Any, setting: Setting) -> None:
    """Patch a transformers model, with or without adapters, or raise ValueError or ImportError."""
    for patch in PATCHES:
        if patch.applies(model, setting):
            patch.apply(model, setting)
