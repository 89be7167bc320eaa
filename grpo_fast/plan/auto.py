"""What a run leaves to the plan: each `auto` becomes a value before anything is built."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.load import load_config
from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.record import CONFIG_FILE
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.config.schema import TrainConfig, at
from grpo_fast.config.stages import resolve_stages
from grpo_fast.data import load_prompts
from grpo_fast.environments import load_toolsets
from grpo_fast.plan.devices import DeviceBudget, device_budget
from grpo_fast.plan.model_shape import Shapes, model_config
from grpo_fast.plan.prediction import Prediction, with_dtype
from grpo_fast.plan.room import cheapest_change
from grpo_fast.plan.search import (
    CONSTANTS,
    RECOMPUTED,
    Search,
    divisions,
    with_constants,
    with_values,
    written,
)
from grpo_fast.policy import load_tokenizer
from grpo_fast.policy.load import resolve_device
from grpo_fast.record.summary import bytes_text
from grpo_fast.rollout import chosen_engine
from grpo_fast.rollout.engines import draws_with_policy

logger = logging.getLogger(__name__)
GROUP = "rollout.num_generations"
LIMIT = "dataset.max_prompt_length"
FIRST = (GROUP, "distributed.mode")  # what is chosen before all else

OF_ALL_STAGES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "micro_batch_tokens": min,
    "model.gradient_checkpointing": partial(max, key=RECOMPUTED.index),
    "memory.offload": partial(max, key=len),
    "rollout.vllm.sleep_level": max,
    "rollout.vllm.max_sequences": min,
    "rollout.vllm.kv_cache_gib": max,
}
"""What is chosen once for a run, and which of its stages' choices suits them all."""


def resolve_auto(config: TrainConfig, run_dir: Path | None = None, *, ranks: int = 1) -> TrainConfig:
    """The configuration with values for what it leaves to the plan: on a CPU, constants.

    Args:
        config: a run's.
        run_dir: its folder. Where it holds the run already, a group keeps the size that the run was started
            with, and weights their dtype, whatever machine this is: others would make it another run.
        ranks: which train together; the others' devices are as this one.

    Raises:
        ValueError: not even two completions of a prompt fit, or as `divisions`.
        Exception: as `load_prompts`, which is asked for the longest prompt where no limit is set.
    """
    on = resolve_device(config.model.device)
    saved = None if run_dir is None else run_dir / CONFIG_FILE
    before = load_config(saved) if saved is not None and saved.exists() else None
    if before is not None and config.model.dtype == "auto":
        config = with_values(config, {"model.dtype": before.model.dtype})
    config = with_dtype(config, on.type)
    if config.algorithm != "grpo":
        return with_constants(config)
    engine = chosen_engine(config.rollout, on)
    config = _with_corrections(config, engine)
    if before is not None:
        started = _groups(before)
        config = _with_groups(config, started if len(started) == 1 + len(config.stages) else started[:1])
    constants = _with_groups(with_constants(config), [CONSTANTS[GROUP]] * (1 + len(config.stages)))
    device = device_budget("cpu") if on.type == "cpu" else device_budget()
    if ranks > 1:
        device = replace(device, ranks=ranks, node=int(os.environ.get("LOCAL_WORLD_SIZE", device.node)))
        of, allowed = config.model, config.model.trust_remote_code
        model = model_config(of.path, revision=of.revision, trust_remote_code=allowed)
        constants, *_ = divisions(constants, model, device)
    if on.type == "cpu":
        return constants
    lengths = _prompt_lengths(config)
    try:
        shapes = shapes_of(config.model.path, config.model.revision)
        divided = divisions(config, shapes.config, device)
        found = [_chosen(one, engine, lengths, shapes, device) for one in divided]
    except (ValueError, RuntimeError) as error:  # a model that trains, but that the plan cannot trace
        logger.warning("nothing is planned, and `auto` is what it is on a CPU: %s", error)
        return constants
    # The fewest stages that do not fit, then the fewest seconds a completion.
    with_groups, searches, choices = min(
        reversed(found),
        key=lambda one: (one[2].count(None), sum(choice.cost[1] for choice in one[2] if choice)),
    )
    if None in choices:
        raise ValueError(_too_large(searches[choices.index(None)]))
    chosen = [choice.values for choice in choices if choice]
    values = {
        key: of_all([values[key] for values in chosen])
        for key, of_all in OF_ALL_STAGES.items()
        if at(config, key) in ("auto", None) and key in chosen[0]
    }
    first = {key: value for key in FIRST if (value := at(with_groups, key)) != at(config, key)}
    several = f"{ranks} ranks on " if ranks > 1 else ""
    total, told = bytes_text(device.total), written(values | first)
    logger.warning("chosen for %s%s, %s: %s", several, device.name, total, told)
    return with_values(with_groups, values)


def longest_prompt(dataset: DatasetConfig, model: ModelConfig, rollout: RolloutConfig) -> int:
    """Tokens: the limit that is set, or of the longest in the data, which is read for it, tools shown."""
    if dataset.max_prompt_length is not None:
        return dataset.max_prompt_length
    toolsets = load_toolsets(rollout)
    schemas = None if toolsets is None else toolsets.schemas
    prompts = load_prompts(dataset, load_tokenizer(model), schemas)
    return max(len(prompt.token_ids) for prompt in prompts)


@lru_cache(maxsize=1)
def shapes_of(path: str, revision: str | None) -> Shapes:
    """Of the model that this process trains."""
    return Shapes(model_config(path, revision=revision))


def _chosen(
    config: TrainConfig, engine: str, lengths: Sequence[dict[str, int]], shapes: Shapes, device: DeviceBudget
) -> tuple[TrainConfig, list[Search], list[Prediction | None]]:
    """The configuration with its groups, and for each stage what is the fastest; None: nothing fits.

    Args:
        lengths: keys of each stage that say how long prompts and questions are.
    """

    def searches_of(config: TrainConfig) -> list[Search]:
        runs = (stage.config for stage in resolve_stages(config))
        return [
            Search(with_values(run, {"rollout.engine": engine, **told}), shapes, device)
            for run, told in zip(runs, lengths, strict=True)
        ]

    found = [search.generations() or 2 for search in searches_of(config)]
    own = _groups(config)[1:] or [None]
    inherited = [size for size, told in zip(found, own, strict=True) if told is None]
    with_groups = _with_groups(config, [min(inherited or found), *found])
    searches = searches_of(with_groups)
    return with_groups, searches, [search.fastest(search.generations() or 2) for search in searches]


def _prompt_lengths(config: TrainConfig) -> list[dict[str, int]]:
    """For each stage, as keys, tokens of its longest prompt and of the longest question of evaluation."""
    known: dict[tuple[str, str], int] = {}

    def longest(dataset: DatasetConfig, rollout: RolloutConfig) -> int:
        key = dataset.model_dump_json(), rollout.model_dump_json(include={"tools", "environment"})
        if key not in known:
            known[key] = longest_prompt(dataset, config.model, rollout)
        return known[key]

    questions = config.evaluation.dataset
    told = {f"evaluation.{LIMIT}": longest(questions, config.rollout)} if questions else {}
    runs = (stage.config for stage in resolve_stages(config))
    return [{LIMIT: longest(run.dataset, run.rollout)} | told for run in runs]


def _groups(config: TrainConfig) -> list[int | str | None]:
    """`num_generations` of the run, and of each stage; None: as the run's."""
    own = (stage.overrides.get("rollout", {}).get("num_generations") for stage in config.stages)
    return [config.rollout.num_generations, *own]


def _with_groups(config: TrainConfig, sizes: Sequence[int | str | None]) -> TrainConfig:
    """With these, of the run and of each stage, for every `num_generations: auto`."""
    if config.rollout.num_generations == "auto":
        config = with_values(config, {GROUP: sizes[0]})
    stages = list(config.stages)
    for index, (stage, size) in enumerate(zip(config.stages, sizes[1:], strict=False)):
        if stage.overrides.get("rollout", {}).get("num_generations") == "auto" and size is not None:
            overrides = _over(stage.overrides, "rollout", num_generations=size)
            stages[index] = stage.model_copy(update={"overrides": overrides})
    return config.model_copy(update={"stages": stages})


def _with_corrections(config: TrainConfig, engine: str) -> TrainConfig:
    """With what a null `loss.sampler_correction` means for this engine, of the run and of each stage."""
    own_logprobs = draws_with_policy(engine)
    whole, stages = config.with_sampler(draws_with_policy=own_logprobs), []
    for stage, resolved in zip(config.stages, resolve_stages(config), strict=False):
        corrected, overrides = resolved.config.with_sampler(draws_with_policy=own_logprobs), stage.overrides
        own = corrected.loss.sampler_correction
        # Either may replace the section.
        if own != whole.loss.sampler_correction or overrides.keys() & {"loss", "method"}:
            overrides = _over(overrides, "loss", sampler_correction=own)
        stages.append(stage.model_copy(update={"overrides": overrides}))
    return whole.model_copy(update={"stages": stages})


def _over(overrides: dict[str, Any], section: str, **values: Any) -> dict[str, Any]:
    return overrides | {section: overrides.get(section, {}) | values}


def _too_large(search: Search) -> str:
    least, device = search.least(), search.device
    change = cheapest_change(search)
    return (
        f"{search.config.model.path} does not fit {device.name}: {least.sizes.prompts} prompts with "
        f"{least.sizes.generations} completions need {bytes_text(-least.free)} more than its "
        f"{bytes_text(device.total)}, however little is there at once. What makes room: "
        f"{written(change) if change else 'shorter completions, or a larger GPU'}"
    )
