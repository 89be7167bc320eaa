"""A method by one word: what its paper, or its authors' recipe, sets beside the surrogate.

`METHODS` has keys of the configuration and their values, which lie below what the user sets. The
configuration then holds all of them, so what is the method's and what is not follows from the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

from grpo_fast.config.groups import AdvantageConfig
from grpo_fast.config.section import one_of, short, words
from grpo_fast.objective.catalog import CATALOG, METHODS
from grpo_fast.objective.config import GRPOLossConfig

if TYPE_CHECKING:
    from grpo_fast.config.schema import TrainConfig

# The sections that a method fills; another method replaces them.
SECTIONS: dict[str, Any] = {"loss": GRPOLossConfig, "advantage": AdvantageConfig}
# What turns rewards into advantages.
ESTIMATOR = {"advantage.multi_objective_aggregation"}.union(*(facts.estimator for facts in CATALOG.values()))
# Follow from the engine, from lengths and from cost: with another value of them a method is still itself.
_OF_THE_RUN = {
    *("loss.sampler_correction", "loss.sampler_clip_min", "loss.sampler_clip_max"),
    *("loss.max_completion_length", "advantage.max_draws", "advantage.skip_flat_groups"),
}


MethodName = Annotated[str, one_of(METHODS, "method"), words(METHODS)]


def with_method(settings: Any) -> Any:
    """A configuration's settings over those of the method that they name.

    Beside another `loss_type` than the method's, the method's keys of `loss` are left out: they are about its
    own.
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


def without_sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without what another method replaces."""
    return {key: value for key, value in settings.items() if key not in (*SECTIONS, "old_logprobs")}


def departures(config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Keys by which a configuration is not its method's: the value in force, and the method's."""
    if config.method is None:
        return {}
    return {
        key: (value, wanted)
        for key, value, wanted in _beside(config, METHODS[config.method])
        if value != wanted and key not in _OF_THE_RUN
    }


def comes_from_method(config: TrainConfig, key: str) -> bool:
    """Whether a key has the value that the configuration's method gives it."""
    own = METHODS.get(config.method or "", {})
    return key in own and attrgetter(key)(config) == own[key]


def method_remarks(config: TrainConfig) -> dict[str, str]:
    """What a print of the configuration says beside keys that its method sets, or that depart from it."""
    if config.method is None:
        return {}
    own = {key: f"by method {config.method}" for key in METHODS[config.method]}
    departed = {key: f"{config.method}: {short(wanted)}" for key, (_, wanted) in departures(config).items()}
    return own | departed


def describe_method(config: TrainConfig) -> str:
    """What of a configuration its method sets, and what is set otherwise.

    Without a method: where advantages are not those of the paper whose surrogate `loss_type` is, or nothing.
    """
    if config.method is None:
        return _surrogate_alone(config)
    own, changed = METHODS[config.method], departures(config)
    kept = " ".join(f"{key}={short(own[key])}" for key in own if key not in changed)
    return f"{config.method} sets {kept}" + (
        f"; no longer {config.method}: {_listed(changed)}" if changed else ""
    )


def _surrogate_alone(config: TrainConfig) -> str:
    name = config.loss.loss_type
    if name not in METHODS or config.advantage.function is not None:
        return ""
    read = ESTIMATOR | ({"loss.kl_in_reward"} if config.loss.beta else set())
    beside = [(key, *pair) for key, *pair in _beside(config, METHODS[name]) if key in read]
    changed = {key: (value, wanted) for key, value, wanted in beside if value != wanted}
    if not changed:
        return ""
    return (
        f"loss_type = {name} sets the surrogate alone; advantages are not those of {name}, by "
        f"{_listed(changed)}: `method: {name}` sets them"
    )


def _listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(
        f"{key}={short(value)} (not {short(wanted)})" for key, (value, wanted) in changed.items()
    )


def _beside(config: TrainConfig, own: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Each key that a method may set, its value in a configuration and in the method."""
    for name, section in SECTIONS.items():
        prefix = f"{name}."
        pure = section(**{key.removeprefix(prefix): own[key] for key in own if key.startswith(prefix)})
        given = getattr(config, name)
        for key in getattr(section, "model_fields", None) or section.__dataclass_fields__:
            yield f"{prefix}{key}", getattr(given, key), getattr(pure, key)
    for key in own:
        if "." not in key:
            yield key, getattr(config, key), own[key]
