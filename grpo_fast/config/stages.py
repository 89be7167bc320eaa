"""A run in stages: what each trains with, and which one a step belongs to.

A stage overrides sections of the configuration and leaves the rest: `loss: {beta: 0.05}` changes one key.
An override that names what a section is made of (`dataset.source`, `loss.loss_type`, `groups.strategy`,
`adaptive_weights.method`) replaces the whole section, since the other keys belonged to the old choice;
another `method` replaces all that methods set.
The stage follows from the step, so a resumed run is in the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from grpo_fast.config.methods import without_sections
from grpo_fast.config.section import PositiveInt, Section

if TYPE_CHECKING:
    from grpo_fast.config.schema import TrainConfig

# One engine, one model and one record of the run serve all stages.
OVERRIDABLE = (
    *("method", "dataset", "rewards", "rollout", "advantage", "loss", "groups", "curriculum"),
    *("adaptive_weights", "optimizer", "prompts_per_step", "num_iterations", "minibatches", "old_logprobs"),
)
# Engine and optimizer are made once; a stage changes how they sample and step.
SERVES_ALL = {
    "rollout": ("engine", "max_batch_tokens", "router_replay"),
    "optimizer": ("kind", "stochastic_rounding"),
}
# The context to validate a part of a run in: what it does not read may be for another part.
PARTIAL = "partial"
# Another value of this key replaces its whole section.
SECTION_DISCRIMINATOR = dict(dataset="source", loss="loss_type", groups="strategy", adaptive_weights="method")


class StageConfig(Section):
    """A stretch of the run with settings of its own."""

    name: Annotated[str, Field(min_length=1)] = Field(description="in messages and the report; each another")
    steps: PositiveInt | None = Field(None, description="steps; null, for the last stage: until max_steps")
    fresh_optimizer: bool = Field(
        False, description="forget the moments, and begin the learning rate's schedule anew"
    )
    overrides: dict[str, Any] = Field(
        {},
        description="sections as at the top level; a new source, loss_type, strategy or method replaces its "
        "section",
    )


@dataclass(frozen=True)
class Stage:
    """One stretch of a run."""

    name: str
    start: int  # its first step, counted from 0
    end: int  # the step after its last
    config: TrainConfig  # of this stage; `stages` is empty
    fresh_optimizer: bool

    @property
    def steps(self) -> int:
        return self.end - self.start


def resolve_stages(config: TrainConfig) -> tuple[Stage, ...]:
    """The stages of a run in order; one that is the whole run where none are configured.

    Raises:
        ValueError: names that repeat, steps that don't add up to max_steps, or overrides that are not allowed
            or make no valid configuration; the message names the stage.
    """
    if not config.stages:
        return (Stage("", 0, config.max_steps, config, fresh_optimizer=False),)
    names = [stage.name for stage in config.stages]
    if len(set(names)) < len(names):
        raise ValueError(f"stages = {names}: two have one name; rename one")
    base = config.model_dump() | {"stages": []}
    stages = tuple(
        Stage(stage.name, start, end, _configure(type(config), stage, base), stage.fresh_optimizer)
        for stage, (start, end) in zip(config.stages, pairwise(_bounds(config)), strict=True)
    )
    for index, stage in enumerate(stages):
        warmup, steps = stage.config.optimizer.warmup_steps, schedule_steps(stages, index)
        if warmup >= steps:
            raise ValueError(
                f"stage {stage.name!r}: optimizer.warmup_steps = {warmup} leaves no step of the {steps} "
                "until the next fresh optimizer at the full rate; lower it"
            )
    return stages


def stage_at(stages: Sequence[Stage], step: int) -> int:
    """Index of the stage that trains `step`; beyond the end, of the last one."""
    return next((i for i, stage in enumerate(stages) if step < stage.end), len(stages) - 1)


def schedule_steps(stages: Sequence[Stage], index: int) -> int:
    """Steps from one fresh optimizer to the next, around stage `index`: what its schedule spans."""
    first = max((i for i in range(1, index + 1) if stages[i].fresh_optimizer), default=0)
    last = next((i for i in range(index + 1, len(stages)) if stages[i].fresh_optimizer), len(stages))
    return sum(stage.steps for stage in stages[first:last])


def _bounds(config: TrainConfig) -> list[int]:
    """Where each stage starts, and the end."""
    *earlier, last = config.stages
    bounds = [0]
    for stage in earlier:
        if stage.steps is None:
            raise ValueError(f"stages: {stage.name!r} has no steps; only the last stage may leave them out")
        bounds.append(bounds[-1] + stage.steps)
    end = config.max_steps if last.steps is None else bounds[-1] + last.steps
    if end != config.max_steps or bounds[-1] >= end:
        raise ValueError(
            f"stages take {end if last.steps else bounds[-1]} steps and max_steps is {config.max_steps}: set "
            "max_steps to their sum, or leave out the steps of the last stage, which then takes what remains"
        )
    return [*bounds, end]


def _check_overrides(stage: StageConfig) -> None:
    for key in stage.overrides.keys() - set(OVERRIDABLE):
        raise ValueError(
            f"overrides {key!r}, which is the same for the whole run; a stage may override "
            f"{', '.join(OVERRIDABLE)}"
        )
    for section, names in SERVES_ALL.items():
        found = stage.overrides.get(section)
        for name in names:
            if isinstance(found, Mapping) and name in found:
                raise ValueError(f"overrides {section}.{name}, one for all stages; set it at the top level")
    if "optimizer" in stage.overrides and not stage.fresh_optimizer:
        raise ValueError(
            "overrides the optimizer, whose state goes on from the stage before; add fresh_optimizer: true"
        )


def _configure(kind: type[TrainConfig], stage: StageConfig, base: Mapping[str, Any]) -> TrainConfig:
    try:
        _check_overrides(stage)
        if stage.overrides.get("method", base["method"]) != base["method"]:
            base = without_sections(base)
        changes = {key: _merge(key, base.get(key, {}), value) for key, value in stage.overrides.items()}
        merged = {**base, **changes}
        return kind.model_validate(merged, context=PARTIAL)
    except ValidationError as error:
        problems = "; ".join(_problem(item) for item in error.errors(include_url=False))
    except ValueError as error:
        problems = str(error)
    raise ValueError(f"stage {stage.name!r}: {problems}")


def _merge(key: str, below: Any, above: Any) -> Any:
    sections = isinstance(below, Mapping) and isinstance(above, Mapping)
    return {**below, **above} if sections and SECTION_DISCRIMINATOR.get(key) not in above else above


def _problem(item: Mapping[str, Any]) -> str:
    place = ".".join(map(str, item["loc"]))
    return f"{place + ': ' if place else ''}{item['msg'].removeprefix('Value error, ')}"
