"""What a run leaves to the plan: `num_generations: auto`, and vLLM's bytes for keys and values."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_fast.config import TrainConfig
from grpo_fast.config_io import load_config
from grpo_fast.plan.devices import DeviceBudget, device_budget
from grpo_fast.plan.model_shape import model_config
from grpo_fast.plan.prediction import Predictor
from grpo_fast.plan.search import largest_generations, plan, with_constants
from grpo_fast.plan.sizes import step_sizes
from grpo_fast.plan.trace import Traces
from grpo_fast.policy.load import resolve_device
from grpo_fast.run_record.files import CONFIG_FILE
from grpo_fast.run_record.summary import bytes_text
from grpo_fast.stages import resolve_stages

logger = logging.getLogger(__name__)

AUTO_MOST = 64
"""Completions of a prompt that `auto` goes up to: DeepSeekMath's group (arXiv:2402.03300, section 4.2). More
cost time in proportion, and are given as a number."""

ELSEWHERE = 8


def resolve_auto(config: TrainConfig, run_dir: Path | None = None) -> TrainConfig:
    """The configuration with numbers for every `num_generations: auto`; unchanged where there is none.

    Args:
        config: a run's.
        run_dir: its folder. Where it holds the run already, the numbers are those the run was started with,
            whatever memory there is today: another group would make it another run.

    Raises:
        ValueError: the longest prompt is not known, or not even two completions of a prompt fit.
    """
    config = with_constants(config)
    tree = config.model_dump()
    rollouts = _rollouts(tree)
    if config.algorithm != "grpo" or "auto" not in [rollout.get("num_generations") for rollout in rollouts]:
        return config
    if _device_at_hand(config).kind == "cpu":
        for rollout in rollouts:
            if rollout.get("num_generations") == "auto":
                rollout["num_generations"] = ELSEWHERE
        return TrainConfig.model_validate(tree)
    saved = None if run_dir is None else run_dir / CONFIG_FILE
    sizes: Sequence[int | None]
    if saved is not None and saved.exists():
        started = [rollout.get("num_generations") for rollout in _rollouts(load_config(saved).model_dump())]
        sizes = started if len(started) == len(rollouts) else started[:1]
    else:
        sizes = _largest_sizes(config, rollouts)
    for rollout, size in zip(rollouts, sizes, strict=False):
        if rollout.get("num_generations") == "auto" and size is not None:
            rollout["num_generations"] = size
    return TrainConfig.model_validate(tree)


def _rollouts(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The run's section and what each stage overrides of it: each may name a group's size."""
    return [tree["rollout"], *(stage["overrides"].get("rollout", {}) for stage in tree["stages"])]


def _largest_sizes(config: TrainConfig, rollouts: list[dict[str, Any]]) -> list[int]:
    """For each of the sections, what fits in all stages that take their group's size from it."""
    device, traces = _device_at_hand(config), _traces_of(config)
    found = []
    for stage in resolve_stages(config):
        size = stage.config.rollout.num_generations
        found.append(_largest(stage.config, traces, device) if size == "auto" else size)
    own = ["num_generations" in rollout for rollout in rollouts[1:]] or [False]
    inherited = [size for size, is_own in zip(found, own, strict=True) if not is_own]
    # Where every stage has a number of its own, the run's is never used, but must be one.
    of_run = min(inherited or found)
    used = {size if is_own else of_run: None for size, is_own in zip(found, own, strict=True)}
    logger.warning(
        "rollout.num_generations = auto: %s%s (%s, %s)",
        ", then ".join(map(str, used)),
        ", the most that auto takes" if set(used) == {AUTO_MOST} else "",
        device.name,
        bytes_text(device.total),
    )
    return [of_run, *found]


def planned_kv_cache_bytes(config: TrainConfig) -> int | None:
    """What vLLM on a GPU gets for keys and values, so that nothing of a step is preempted; for `make_engine`.

    Less where the device has no room for all of them. None where it is not for us to say: another engine, a
    size of the user's, or prompts of unknown length.

    Args:
        config: without `num_generations: auto`.

    Raises:
        ValueError: no room for even one completion.
    """
    rollout, vllm = config.rollout, config.rollout.vllm
    given = vllm.kv_cache_gib is not None or vllm.gpu_memory_utilization is not None
    if given or rollout.engine == "transformers" or config.dataset.max_prompt_length is None:
        return None
    device = _device_at_hand(config)
    if device.kind != "cuda":
        return None
    traces = _traces_of(config)
    plans = [
        plan(stage.config, traces, device, knobs=False)
        for stage in resolve_stages(config)
        if stage.config.dataset.max_prompt_length is not None
    ]
    needed, room = max(p.kv_cache_bytes for p in plans), min(p.kv_cache_room for p in plans)
    longest = traces.shape(config.model).paged_kv_bytes(max(p.sizes.sequence_length for p in plans))
    if room < longest:
        raise ValueError(
            f"the rollout leaves {bytes_text(max(0, room))} for keys and values, and one completion needs "
            f"{bytes_text(longest)}. `grpo-fast plan` lists what makes room"
        )
    if room < needed:
        logger.warning(
            "keys and values of a step need %s and have %s: some completions will wait or be preempted",
            bytes_text(needed),
            bytes_text(room),
        )
    return min(needed, room)


def _largest(config: TrainConfig, traces: Traces, device: DeviceBudget) -> int:
    if config.dataset.max_prompt_length is None:
        raise ValueError(
            "rollout.num_generations = 'auto' needs dataset.max_prompt_length: set it, or give a number"
        )
    predictor, sizes = Predictor(config, traces, device), step_sizes(config)
    generations = largest_generations(predictor, sizes)
    if generations is None:
        needed = device.total - predictor.predict(sizes).free
        raise ValueError(
            f"rollout.num_generations = 'auto': two completions for each of {sizes.prompts} prompts need "
            f"{bytes_text(needed)}, and {device.name} has {bytes_text(device.total)}. `grpo-fast plan` "
            "lists what makes room"
        )
    return min(generations, AUTO_MOST)


def _device_at_hand(config: TrainConfig) -> DeviceBudget:
    return device_budget("cpu" if resolve_device(config.model.device).type == "cpu" else None)


def _traces_of(config: TrainConfig) -> Traces:
    return Traces(model_config(config.model.path, revision=config.model.revision))
