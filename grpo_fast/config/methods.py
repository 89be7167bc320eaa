"""Presets: `method` sets the loss, advantages and more as a paper or its authors' recipe does.

The user's keys override those of `METHODS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from grpo_fast.config.section import at, one_of, short, words
from grpo_fast.objective.catalog import CATALOG, METHODS

if TYPE_CHECKING:
    from grpo_fast.config.schema import TrainConfig

REPLACED = ("loss", "advantage", "old_logprobs")  # by another method
# Keys that turn rewards into advantages.
ESTIMATOR = {"advantage.multi_objective_aggregation"}.union(*(facts.estimator for facts in CATALOG.values()))
# A method does not depend on the values of these.
_OF_THE_RUN = ("advantage.max_draws", "advantage.skip_flat_groups")

MethodName = Annotated[str, one_of(METHODS, "method"), words(METHODS)]


def with_method(settings: Any) -> Any:
    """Merge a configuration's settings over those of its method.

    With another `loss_type`, the method's keys of `loss` are left out.
    """
    if not isinstance(settings, Mapping) or settings.get("algorithm", "grpo") != "grpo":
        return settings
    tree, method = dict(settings), METHODS.get(str(settings.get("method")), {})
    for key, value in method.items():
        section, _, name = key.rpartition(".")
        given = tree.get(section, {})
        if not section:
            tree.setdefault(key, value)
        elif isinstance(given, Mapping):
            other_loss = given.get("loss_type", method["loss.loss_type"]) != method["loss.loss_type"]
            tree[section] = given if other_loss else {name: value, **given}
    return tree


def departures(config: TrainConfig, method: str | None) -> dict[str, tuple[Any, Any]]:
    """Return (value, method's value) of each key of a method that the configuration overrides."""
    own = {key: value for key, value in METHODS.get(method or "", {}).items() if key not in _OF_THE_RUN}
    return {key: (at(config, key), value) for key, value in own.items() if at(config, key) != value}


def describe_method(config: TrainConfig) -> str:
    """Describe what the method sets, and what overrides it.

    Without a method, describe how advantages differ from those of the paper of `loss_type`, if they do.
    """
    name, alone = config.method or config.loss.loss_type, config.method is None
    changed = departures(config, name)
    if alone:
        read = ESTIMATOR | ({"loss.kl_in_reward"} if config.loss.beta else set())
        changed = {
            key: pair for key, pair in changed.items() if key in read and not config.advantage.function
        }
    listed = ", ".join(f"{key}={short(value)} (not {short(its)})" for key, (value, its) in changed.items())
    if alone:
        return listed and (
            f"loss_type = {name} sets the surrogate alone; advantages are not those of {name}, by {listed}: "
            f"`method: {name}` sets them"
        )
    kept = " ".join(f"{key}={short(value)}" for key, value in METHODS[name].items() if key not in changed)
    return f"{name} sets {kept}" + (f"; no longer {name}: {listed}" if changed else "")
