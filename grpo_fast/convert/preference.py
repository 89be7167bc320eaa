"""Preference training (DPO and its kin): the terms of its loss, and what it does not read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grpo_fast.config_io.foreign_rules import Places
from grpo_fast.objective.pairs import PREFERENCE_LOSSES

# Sections that only training on the policy's own completions reads.
SAMPLING = frozenset({"rewards", "rollout", "advantage", "loss", "num_iterations", "minibatches"})
UNREAD = "training on fixed completions does not read it"

AXOLOTL_LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}

Translate = Callable[[Any, Mapping[str, Any]], Places]


def loss_type(value: Any, siblings: Mapping[str, Any]) -> Places:
    """TRL's names are ours, but for `sigmoid` with smoothed labels, which is cDPO."""
    names = [value] if isinstance(value, str) else list(value)
    if siblings.get("label_smoothing"):
        names = ["cdpo" if name == "sigmoid" else name for name in names]
    unknown = [name for name in names if name not in PREFERENCE_LOSSES]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not offered; choose among {', '.join(PREFERENCE_LOSSES)}")
    return {"preference.loss.loss_type": names[0] if len(names) == 1 else names}


def term(name: str) -> Translate:
    """A constant of the loss; null and zero leave ours as it is."""

    def translate(value: Any, _: Mapping[str, Any]) -> Places:
        return {f"preference.loss.{name}": value} if value else {}

    return translate


TERMS: dict[str, Translate] = {
    "beta": term("beta"),
    "dpo_label_smoothing": term("label_smoothing"),
    "kto_desirable_weight": term("desirable_weight"),
    "kto_undesirable_weight": term("undesirable_weight"),
    "label_smoothing": term("label_smoothing"),
    "loss_type": loss_type,
    "loss_weights": term("loss_weights"),
    "rl_beta": term("beta"),
    "simpo_gamma": term("gamma"),
}
