"""What a run leaves to the plan: `num_generations: auto`, and vLLM's bytes for keys and values."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_fast.config import TrainConfig
from grpo_fast.config_io import load_config
from grpo_fast.plan.devices import DeviceBudget, device_budget, format_bytes
from grpo_fast.plan.model_shape import model_config
from grpo_fast.plan.prediction import Predictor
from grpo_fast.plan.search import largest_generations, plan
from grpo_fast.plan.setup import setup_of, step_sizes
from grpo_fast.plan.trace import Traces
from grpo_fast.policy.load import resolve_device
from grpo_fast.run_record.files import CONFIG_FILE
from grpo_fast.stages import resolve_stages

logger = logging.getLogger(__name__)

AUTO_MOST = 64
"""Completions of a prompt that `auto` goes up to: DeepSeekMath's group (arXiv:2402.03300, section 4.2). More
cost time in proportion, and are given as a number."""


def resolve_auto(config: TrainConfig, run_dir: Path | None = None) -> TrainConfig:
    """The configuration with numbers for every `num_generations: auto`; unchanged where there is none.

    Args:
        config: a run's.
        run_dir: its folder. Where it holds the run already, the numbers are those the run was started with,
            whatever memory there is today: another group would make it another run.

    Raises:
        ValueError: the longest prompt is not known, or not even two completions of a prompt fit.
    """
    given = [config.rollout.num_generations, *_of_stages(config)]
    if config.algorithm != "grpo" or "auto" not in given:
        return config
    saved = None if run_dir is None else run_dir / CONFIG_FILE
    if saved is not None and saved.exists():
        return _as_started(config, load_config(saved))
    device, traces = _device_at_hand(config), _traces_of(config)
    largest = [
        _largest(stage.config, traces, device) if stage.config.rollout.num_generations == "auto" else None
        for stage in resolve_stages(config)
    ]
    own = [size == "auto" for size in _of_stages(config)] or [False]
    inherited = [size for size, is_own in zip(largest, own, strict=True) if size is not None and not is_own]
    of_stages = [size if is_own else None for size, is_own in zip(largest, own, strict=True)]
    chosen = _with_sizes(config, min(inherited, default=None), of_stages)
    sizes = dict.fromkeys(stage.config.rollout.num_generations for stage in resolve_stages(chosen))
    logger.warning(
        "rollout.num_generations = auto: %s%s (%s, %s)",
        ", then ".join(map(str, sizes)),
        ", the most that auto takes" if set(sizes) == {AUTO_MOST} else "",
        device.name,
        format_bytes(device.total),
    )
    return chosen


def planned_kv_cache_bytes(config: TrainConfig) -> int | None:
    """What vLLM on a GPU gets for keys and values, so that nothing of a step is preempted; for `make_engine`.

    Less where the device has no room for all of them. None where it is not for us to say: another engine, a
    size of the user's, or prompts of unknown length.

    Args:
        config: without `num_generations: auto`.

    Raises:
        ValueError: no room for even one completion.
    """
    vllm = config.rollout.vllm
    given = vllm.kv_cache_gib is not None or vllm.gpu_memory_utilization is not None
    if given or config.dataset.max_prompt_length is None:
        return None
    device, traces = _device_at_hand(config), _traces_of(config)
    if device.kind != "cuda" or setup_of(config, traces.config, device).engine != "vllm":
        return None
    plans = [
        plan(stage.config, traces, device, knobs=False)
        for stage in resolve_stages(config)
        if stage.config.dataset.max_prompt_length is not None
    ]
    needed, room = max(p.kv_cache_bytes for p in plans), min(p.kv_cache_room for p in plans)
    longest = traces.shape(config.model).paged_kv_bytes(max(p.sizes.sequence_length for p in plans))
    if room < longest:
        raise ValueError(
            f"the rollout leaves {format_bytes(max(0, room))} for keys and values, and one completion needs "
            f"{format_bytes(longest)}. `grpo-fast plan` lists what makes room"
        )
    if room < needed:
        logger.warning(
            "keys and values of a step need %s and have %s: some completions will wait or be preempted",
            format_bytes(needed),
            format_bytes(room),
        )
    return min(needed, room)


def _largest(config: TrainConfig, traces: Traces, device: DeviceBudget) -> int:
    if config.dataset.max_prompt_length is None:
        raise ValueError(
            "rollout.num_generations = 'auto' needs dataset.max_prompt_length: set it, or give a number"
        )
    predictor, sizes = Predictor(setup_of(config, traces.config, device), traces=traces), step_sizes(config)
    generations = largest_generations(predictor, sizes)
    if generations is None:
        needed = device.total - predictor.predict(sizes).free
        raise ValueError(
            f"rollout.num_generations = 'auto': two completions for each of {sizes.prompts} prompts need "
            f"{format_bytes(needed)}, and {device.name} has {format_bytes(device.total)}. `grpo-fast plan` "
            "lists what makes room"
        )
    return min(generations, AUTO_MOST)


def _device_at_hand(config: TrainConfig) -> DeviceBudget:
    return device_budget("cpu" if resolve_device(config.model.device).type == "cpu" else None)


def _traces_of(config: TrainConfig) -> Traces:
    return Traces(model_config(config.model.path, revision=config.model.revision))


def _of_stages(config: TrainConfig) -> list[Any]:
    """The group's size that each stage itself says; None where it leaves the run's."""
    sections = [stage.overrides.get("rollout") for stage in config.stages]
    return [rollout.get("num_generations") if isinstance(rollout, dict) else None for rollout in sections]


def _as_started(config: TrainConfig, started: TrainConfig) -> TrainConfig:
    size = started.rollout.num_generations
    of_run = None if size == "auto" or config.rollout.num_generations != "auto" else size
    wanted, before = _of_stages(config), _of_stages(started)
    if len(wanted) != len(before):
        return _with_sizes(config, of_run, [None] * len(wanted))
    of_stages = [size if own == "auto" else None for own, size in zip(wanted, before, strict=True)]
    return _with_sizes(config, of_run, of_stages)


def _with_sizes(config: TrainConfig, of_run: int | None, of_stages: Sequence[int | None]) -> TrainConfig:
    """The configuration with these numbers, each where it is not None."""
    tree = config.model_dump()
    if config.rollout.num_generations == "auto":
        # Where every stage has a number of its own, the run's own is never used, but must be one.
        tree["rollout"]["num_generations"] = of_run or next(size for size in of_stages if size is not None)
    for stage, size in zip(tree["stages"], of_stages, strict=False):
        if size is not None:
            stage["overrides"]["rollout"]["num_generations"] = size
    return TrainConfig.model_validate(tree)
