"""Resolve each `auto` of a configuration before anything is built."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.load import load_config
from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.record import CONFIG_FILE
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.config.schema import TrainConfig, at
from grpo_fast.config.stages import resolve_stages
from grpo_fast.data import load_prompts
from grpo_fast.environments import load_toolsets
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.measure import measured_shape
from grpo_fast.plan.model_shape import ModelShape, shape_of
from grpo_fast.plan.search import (
    LEVEL,
    RECOMPUTED,
    SYNC,
    Search,
    modes,
    too_large,
    with_values,
    written,
)
from grpo_fast.policy import load_image_reader, load_tokenizer
from grpo_fast.policy.load import resolve_device, resolve_dtype
from grpo_fast.record.summary import bytes_text
from grpo_fast.rollout import chosen_engine

logger = logging.getLogger(__name__)
LIMIT = "dataset.max_prompt_length"

CONSTANTS = {"micro_batch_tokens": 16_384, "model.gradient_checkpointing": False}
"""The values of `auto` on a CPU, and where planning fails."""

OF_ALL_STAGES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "micro_batch_tokens": min,
    "model.gradient_checkpointing": partial(max, key=RECOMPUTED.index),
    "memory.offload": partial(max, key=len),
    SYNC: min,  # "adapter" if one stage needs it
    LEVEL: max,
    "rollout.vllm.max_sequences": min,
    "rollout.vllm.kv_cache_gib": max,
}
"""The values that are chosen once for a run, and how those of its stages are combined."""


def resolve_auto(config: TrainConfig, run_dir: Path | None = None, *, ranks: int = 1) -> TrainConfig:
    """Return the configuration with a value for every `auto`; on a CPU, constants.

    All ranks have devices like this one. A run that resumes in `run_dir` keeps the dtype of its start.

    Raises:
        ValueError: the run does not fit, or as `modes`.
        Exception: as `load_prompts`, unless `dataset.max_prompt_length` is set.
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
    (constants,) = modes(with_constants(config), ranks, whole=True)
    if on.type == "cpu":
        return constants
    lengths = _prompt_lengths(config)
    device = device_budget()
    device = replace(device, ranks=ranks, host=device.host // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    try:
        shape = measured(config.model, shape_of(config.model, on.type, config.reference), on)
        found = []
        for divided in modes(config, ranks, whole=shape.quantized > 0):
            runs = (stage.config for stage in resolve_stages(divided))
            searches = [
                Search(with_values(run, {"rollout.engine": engine, **limits}), shape, device)
                for run, limits in zip(runs, lengths, strict=True)
            ]
            found.append((divided, searches, [search.choose() for search in searches]))
    except (ValueError, RuntimeError) as error:  # a model that can be trained, but not counted
        logger.warning("the planner cannot count the model; `auto` is as on a CPU: %s", error)
        return constants
    # The first mode in which all stages fit, or else the most.
    divided, searches, choices = min(found, key=lambda one: one[2].count(None))
    if None in choices:
        raise ValueError(too_large(searches[choices.index(None)]))
    chosen = [choice.values for choice in choices if choice]
    values = {
        key: of_all([values[key] for values in chosen])
        for key, of_all in OF_ALL_STAGES.items()
        if at(config, key) in ("auto", None) and key in chosen[0]
    }
    if values.get(SYNC) == "adapter" and values.get(LEVEL) == 2:  # which would drop the base
        values[LEVEL] = 1
    if divided.distributed.mode != config.distributed.mode:
        values["distributed.mode"] = divided.distributed.mode
    several = f"{ranks} ranks on " if ranks > 1 else ""
    logger.warning("chosen for %s%s, %s: %s", several, device.name, bytes_text(device.total), written(values))
    return with_values(config, values)


def measured(model: ModelConfig, shape: ModelShape, device: torch.device) -> ModelShape:
    """Return and log `measured_shape`, or the counted shape where the probe fails."""
    try:
        found = measured_shape(model, shape, device)
    except (ValueError, RuntimeError) as error:
        logger.warning("activations are counted, not measured: %s", str(error).splitlines()[0])
        return shape
    if found.measured is not None:
        logger.warning("measured: layers keep %.0f %% of the counted activations", 100 * found.measured)
    return found


def with_dtype(config: TrainConfig, device: str) -> TrainConfig:
    """Resolve `model.dtype`; stochastic rounding needs bfloat16."""
    rounded = config.optimizer.stochastic_rounding
    return with_values(
        config, {"model.dtype": "bfloat16" if rounded else resolve_dtype(config.model.dtype, device)}
    )


def with_constants(config: TrainConfig) -> TrainConfig:
    """Replace `auto` by `CONSTANTS`."""
    return with_values(config, {key: value for key, value in CONSTANTS.items() if at(config, key) == "auto"})


def longest_prompt(dataset: DatasetConfig, model: ModelConfig, rollout: RolloutConfig) -> int:
    """Return `dataset.max_prompt_length`, or the tokens of the data's longest prompt with its tools."""
    if dataset.max_prompt_length is not None:
        return dataset.max_prompt_length
    toolsets = load_toolsets(rollout)
    schemas = None if toolsets is None else toolsets.schemas
    prompts = load_prompts(dataset, load_tokenizer(model), schemas, load_image_reader(model))
    return max(len(prompt.token_ids) for prompt in prompts)


def _prompt_lengths(config: TrainConfig) -> list[dict[str, int]]:
    """Return the longest prompt of each stage and of evaluation, in tokens by key."""
    known: dict[tuple[str, str], int] = {}

    def longest(dataset: DatasetConfig, rollout: RolloutConfig) -> int:
        key = dataset.model_dump_json(), rollout.model_dump_json(include={"tools", "environment"})
        if key not in known:
            known[key] = longest_prompt(dataset, config.model, rollout)
        return known[key]

    questions = config.evaluation.dataset
    limits = {f"evaluation.{LIMIT}": longest(questions, config.rollout)} if questions else {}
    runs = (stage.config for stage in resolve_stages(config))
    return [{LIMIT: longest(run.dataset, run.rollout)} | limits for run in runs]
