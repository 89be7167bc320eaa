"""Stages of a run: the configuration of each, and the stage of a step.

A stage overrides keys: `loss: {beta: 0.05}` changes one. A new `dataset.source`, `loss.loss_type` or
`groups.strategy` replaces its whole section, and another `method` all that methods set. The stage follows
from the step, so a resumed run is in the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from grpo_fast.config.methods import REPLACED
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
    "rollout": {"engine", "max_batch_tokens", "router_replay"},
    "optimizer": {"kind", "stochastic_rounding"},
}
# Another value of this key replaces its whole section.
SECTION_DISCRIMINATOR = {"dataset": "source", "loss": "loss_type", "groups": "strategy"}


class StageConfig(Section):
    """A stage, as configured."""

    name: Annotated[str, Field(min_length=1)] = Field(description="unique; for messages and the report")
    steps: PositiveInt | None = Field(None, description="null, for the last stage: until max_steps")
    fresh_optimizer: bool = Field(
        False, description="reset the moments, and restart the learning rate's schedule"
    )
    overrides: dict[str, Any] = Field(
        {},
        description="sections of the configuration; a new source, loss_type, strategy or method replaces its "
        "section",
    )


@dataclass(frozen=True)
class Stage:
    """A stage, resolved."""

    name: str
    start: int  # its first step, counted from 0
    end: int  # the step after its last
    config: TrainConfig  # of this stage; `stages` is empty
    fresh_optimizer: bool

    @property
    def steps(self) -> int:
        return self.end - self.start


def resolve_stages(config: TrainConfig) -> tuple[Stage, ...]:
    """Return the stages of a run in order; where none are configured, one for the whole run.

    Raises:
        ValueError: names repeat, steps do not add up to max_steps, or overrides are invalid; the message
            names the stage.
    """
    if not config.stages:
        return (Stage("", 0, config.max_steps, config, fresh_optimizer=False),)
    names, base = [stage.name for stage in config.stages], config.model_dump() | {"stages": []}
    if len(set(names)) < len(names):
        raise ValueError(f"stages = {names}: two have the same name; rename one")
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
    """Return the index of the stage of a step; the last one beyond the end."""
    return next((i for i, stage in enumerate(stages) if step < stage.end), len(stages) - 1)


def schedule_steps(stages: Sequence[Stage], index: int) -> int:
    """Count the steps of the learning rate's schedule at stage `index`: between two fresh optimizers."""
    first = max((i for i in range(1, index + 1) if stages[i].fresh_optimizer), default=0)
    last = next((i for i in range(index + 1, len(stages)) if stages[i].fresh_optimizer), len(stages))
    return sum(stage.steps for stage in stages[first:last])


def _bounds(config: TrainConfig) -> list[int]:
    """Return the first step of each stage, and the end."""
    *earlier, last = [stage.steps for stage in config.stages]
    if None in earlier:
        name = config.stages[earlier.index(None)].name
        raise ValueError(f"stages: {name!r} has no steps; only the last stage may leave them out")
    bounds = [*accumulate(filter(None, earlier), initial=0)]
    end = config.max_steps if last is None else bounds[-1] + last
    if end != config.max_steps or bounds[-1] >= end:
        raise ValueError(
            f"stages take {end if last else bounds[-1]} steps and max_steps is {config.max_steps}: set "
            "max_steps to their sum, or leave out the steps of the last stage, which then takes what remains"
        )
    return [*bounds, end]


def _configure(kind: type[TrainConfig], stage: StageConfig, base: Mapping[str, Any]) -> TrainConfig:
    """Merge a stage's overrides into the run's settings, and validate the result once."""
    over = stage.overrides
    try:
        if found := over.keys() - {*OVERRIDABLE}:
            section, _, key = min(found).partition(".")
            inner = f"write the section, {section}: {{{key}: VALUE}}" * (section in OVERRIDABLE)
            remedy = inner or f"a stage may override {', '.join(OVERRIDABLE)}"
            raise ValueError(f"overrides {min(found)!r}; {remedy}")
        for section, names in SERVES_ALL.items():
            if isinstance(given := over.get(section), Mapping) and (found := given.keys() & names):
                raise ValueError(f"overrides {section}.{min(found)}, one for all stages; set it outside")
        if "optimizer" in over and not stage.fresh_optimizer:
            raise ValueError(
                "overrides the optimizer, which continues from the previous stage; add fresh_optimizer: true"
            )
        if over.get("method", base["method"]) != base["method"]:
            base = {key: value for key, value in base.items() if key not in REPLACED}
        return kind.model_validate(
            {**base, **{key: _merged(key, base.get(key, {}), over[key]) for key in over}}
        )
    except ValidationError as error:
        items = [(".".join(map(str, item["loc"])), item["msg"]) for item in error.errors()]
        problems = "; ".join(f"{place}: {text.removeprefix('Value error, ')}" for place, text in items)
    except ValueError as error:
        problems = str(error)
    raise ValueError(f"stage {stage.name!r}: {problems.removeprefix(': ')}")


def _merged(key: str, below: Any, above: Any) -> Any:
    is_section = isinstance(below, Mapping) and isinstance(above, Mapping)
    return {**below, **above} if is_section and SECTION_DISCRIMINATOR.get(key) not in above else above
