"""What fits: the largest micro-batch, the largest group, the room for keys and values, and what buys more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any

import yaml

from grpo_fast.config import TrainConfig, at
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.prediction import PHASES, Calibration, Phase, Prediction, Predictor
from grpo_fast.plan.sizes import MicroBatch, StepSizes, largest, step_sizes, undivided_group
from grpo_fast.plan.trace import Traces
from grpo_fast.policy.config import LoraConfig
from grpo_fast.rollout.handover import PARTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_GENERATIONS = 4096  # where the search for a group's size ends
MOST_TOKENS = 1 << 20  # and that for a micro-batch's
CONSTANTS = {"micro_batch_tokens": 16_384, "model.gradient_checkpointing": False}


@dataclass(frozen=True)
class Knob:
    """One change of the configuration that trades something for memory, and what it would do."""

    change: str  # as it is written on the command line
    saves: dict[Phase, int]  # bytes; negative where it costs some
    cost: str
    largest_num_generations: int | None  # that then fits; None: not even two


@dataclass(frozen=True)
class Plan:
    """A prediction, and what else would fit."""

    predictor: Predictor
    sizes: StepSizes
    prediction: Prediction
    num_generations: int | None  # the largest for which both phases fit; None: not even two
    group_in_one_micro_batch: int | None  # the largest group whose update fits undivided
    micro_batch_tokens: int | None  # the largest micro-batch that fits; None: not even one completion
    kv_cache_bytes: int  # that the completions of a step need at once
    kv_cache_room: int  # that the device has for them beside everything else
    knobs: tuple[Knob, ...]  # what buys most comes first: the largest group, then the most bytes


def plan(
    config: TrainConfig,
    model: PretrainedConfig | Traces,
    device: DeviceBudget,
    *,
    prompt_length: int | None = None,
    calibration: Calibration | None = None,
    knobs: bool = True,
) -> Plan:
    """Sizes of a run that fit on a device and, with `knobs`, the changes that would make room.

    With `num_generations: auto` the plan is for the largest group that fits, or for the smallest where none
    does.

    Args:
        model: configuration of the model that `config.model.path` names, or its traces, if there are any; no
            weights are read.
        prompt_length: tokens of the longest prompt; by default `dataset.max_prompt_length`.

    Raises:
        ValueError: the prompts' length is not known, or the model cannot be packed.
    """
    config = with_constants(config)
    sizes = step_sizes(config, prompt_length=prompt_length)
    traces = model if isinstance(model, Traces) else Traces(model)
    predictor = Predictor(config, traces, device, calibration)
    generations = largest_generations(predictor, sizes)
    if config.rollout.num_generations == "auto" and generations is not None:
        sizes = replace(sizes, generations=generations)
    prediction = predictor.predict(sizes)
    turned = list(_turned_knobs(predictor, sizes, prediction)) if knobs else []
    turned.sort(key=lambda knob: (knob.largest_num_generations or 0, max(knob.saves.values())), reverse=True)
    needed = prediction.parts["rollout"].get("KV cache", 0)
    group, micro_batch_tokens = _largest_updates(predictor, sizes)
    return Plan(
        predictor,
        sizes,
        prediction,
        num_generations=generations,
        group_in_one_micro_batch=group,
        micro_batch_tokens=micro_batch_tokens,
        kv_cache_bytes=needed,
        kv_cache_room=needed + device.total - prediction.total("rollout"),
        knobs=tuple(turned),
    )


def _turned_knobs(predictor: Predictor, sizes: StepSizes, before: Prediction) -> Iterator[Knob]:
    """Those that would save anything."""
    for key, value, cost in _possible_knobs(predictor):
        changed = with_values(predictor.run, {key: value})
        other = Predictor(changed, predictor.traces, predictor.device, predictor.calibration)
        resized = replace(
            step_sizes(changed, prompt_length=sizes.prompt_length), generations=sizes.generations
        )
        then = other.predict(resized)
        saves = {phase: before.total(phase) - then.total(phase) for phase in PHASES}
        if max(saves.values()) > 0:
            text = yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
            yield Knob(f"{key}={text}", saves, cost, largest_generations(other, resized))


def with_constants(config: TrainConfig) -> TrainConfig:
    return with_values(config, {key: value for key, value in CONSTANTS.items() if at(config, key) == "auto"})


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """The configuration with other values of some dotted keys."""
    tree = config.model_dump()
    for key, value in values.items():
        *path, last = key.split(".")
        reduce(getitem, path, tree)[last] = value
    return TrainConfig.model_validate(tree)


def _possible_knobs(predictor: Predictor) -> Iterator[tuple[str, Any, str]]:
    """(key, value, cost) of what the configuration has not turned yet."""
    run, model, vllm = predictor.run, predictor.run.model, predictor.run.rollout.vllm
    if not model.gradient_checkpointing:
        yield "model.gradient_checkpointing", True, "a second forward of every layer"
    if model.lora is None and "experts" not in predictor.shape.parameters:
        yield "model.lora", {"r": LoraConfig().r}, "adapters train, not the weights"
    if model.lora is None and model.train_lm_head:
        yield "model.train_lm_head", False, "the head stays as it is"
    if model.dtype == "float32":
        yield "model.dtype", "bfloat16", "weights of 16 bits"
    if run.loss.needs_reference and model.lora is None:
        yield "loss.beta", 0.0, "no KL to the first policy"
    if predictor.engine == "vllm":
        if run.memory.offload != list(PARTS):
            yield "memory.offload", list(PARTS), "copies at every step"
        if vllm.sleep_level == 0:
            yield "rollout.vllm.sleep_level", "auto", "milliseconds at every step"
        if not predictor.shares_weights and model.lora is not None:
            yield "rollout.vllm.lora_sync", "adapter", "LoRA kernels while decoding"
        if vllm.share_weights is False:
            yield "rollout.vllm.share_weights", "auto", "nothing"
    if int(run.micro_batch_tokens) > 1:
        yield "micro_batch_tokens", int(run.micro_batch_tokens) // 2, "more and smaller forwards"
    if run.prompts_per_step > max(1, run.minibatches):
        half = max(run.minibatches, run.prompts_per_step // 2)
        yield "prompts_per_step", half, "fewer prompts in a step"


def largest_generations(predictor: Predictor, sizes: StepSizes) -> int | None:
    """Completions of a prompt for which the rollout, all in flight, and the update both fit.

    `MOST_GENERATIONS` where so many fit; None where two do not.
    """
    return largest(
        2, MOST_GENERATIONS, lambda count: predictor.predict(replace(sizes, generations=count)).free >= 0
    )


def _largest_updates(predictor: Predictor, sizes: StepSizes) -> tuple[int | None, int | None]:
    """Completions of a prompt whose update fits undivided, and input tokens of the largest micro-batch that
    fits, at most all of a step's; None where not even two completions, or one, fit."""

    def group_fits(count: int) -> bool:
        group = replace(sizes, generations=count)
        return fits(group, undivided_group(group))

    def fits(changed: StepSizes, batch: MicroBatch | None = None) -> bool:
        return predictor.predict(changed, batch).total("update") <= predictor.device.total

    longest = sizes.sequence_length
    everything = min(longest * sizes.groups * sizes.generations, MOST_TOKENS)
    group = largest(2, max(2, min(MOST_GENERATIONS, MOST_TOKENS // longest)), group_fits)
    tokens = largest(
        longest, max(longest, everything), lambda tokens: fits(replace(sizes, micro_batch_tokens=tokens))
    )
    return group, tokens
