"""What fits: the largest micro-batch, the largest group, the room for keys and values, and what buys more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.model_shape import ModelShape
from grpo_fast.plan.prediction import PHASES, Calibration, Phase, Prediction, Predictor
from grpo_fast.plan.setup import StepSizes, setup_of, step_sizes, undivided_group
from grpo_fast.plan.trace import Traces
from grpo_fast.policy.config import LoraConfig
from grpo_fast.rollout.handover import PARTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_GENERATIONS = 4096  # where the search for a group's size ends
MOST_TOKENS = 1 << 20  # and that for a micro-batch's


@dataclass(frozen=True)
class Knob:
    """One change of the configuration that trades something for memory."""

    key: str  # its place, dotted
    value: Any
    cost: str

    @property
    def text(self) -> str:
        """As it is written on the command line."""
        value = self.value
        if isinstance(value, LoraConfig):
            return f"{self.key}={{r: {value.r}}}"
        if isinstance(value, list):
            return f"{self.key}=[{', '.join(value)}]"
        return f"{self.key}={str(value).lower()}"

    def change(self, config: TrainConfig) -> TrainConfig:
        """The configuration with it."""
        return _replaced(config, self.key.split("."), self.value)


def _replaced(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    changed = {name: _replaced(getattr(section, name), rest, value) if rest else value}
    if isinstance(section, BaseModel):
        return section.model_copy(update=changed)
    return replace(section, **changed)


def possible_knobs(config: TrainConfig, prediction: Prediction, shape: ModelShape) -> Iterator[Knob]:
    """What this configuration has not turned yet."""
    model, rollout = config.model, config.rollout
    on_vllm = "engine residue" in prediction.parts["rollout"]
    if not model.gradient_checkpointing:
        yield Knob("model.gradient_checkpointing", True, "a second forward of every layer")
    if model.lora is None and "experts" not in shape.parameters:
        yield Knob("model.lora", LoraConfig(), "adapters train, not the weights")
    if model.lora is None and model.train_lm_head:
        yield Knob("model.train_lm_head", False, "the head stays as it is")
    if model.dtype == "float32":
        yield Knob("model.dtype", "bfloat16", "weights of 16 bits")
    if config.loss.needs_reference and model.lora is None:
        yield Knob("loss.beta", 0.0, "no KL to the first policy")
    if on_vllm and config.memory.offload != list(PARTS):
        yield Knob("memory.offload", list(PARTS), "copies at every step")
    if on_vllm and rollout.vllm.sleep_level == 0:
        yield Knob("rollout.vllm.sleep_level", "auto", "milliseconds at every step")
    if on_vllm and "engine weights" in prediction.parts["rollout"] and model.lora is not None:
        yield Knob("rollout.vllm.lora_sync", "adapter", "LoRA kernels while decoding")
    if on_vllm and rollout.vllm.share_weights is False:
        yield Knob("rollout.vllm.share_weights", "auto", "nothing")
    if config.micro_batch_tokens > 1:
        yield Knob("micro_batch_tokens", config.micro_batch_tokens // 2, "more and smaller forwards")
    if config.prompts_per_step > max(1, config.minibatches):
        half = max(config.minibatches, config.prompts_per_step // 2)
        yield Knob("prompts_per_step", half, "fewer prompts in a step")


@dataclass(frozen=True)
class KnobEffect:
    """What one change would do."""

    knob: Knob
    saves: dict[Phase, int]  # bytes; negative where it costs some
    num_generations: int | None  # the largest that then fits; None: not even two


@dataclass(frozen=True)
class Plan:
    """A prediction, and what else would fit."""

    sizes: StepSizes
    prediction: Prediction
    num_generations: int | None  # the largest for which both phases fit; None: not even two
    group_in_one_micro_batch: int | None  # the largest group whose update fits undivided
    micro_batch_tokens: int | None  # the largest micro-batch that fits; None: not even one completion
    kv_cache_bytes: int  # that the completions of a step need at once
    kv_cache_room: int  # that the device has for them beside everything else
    knobs: tuple[KnobEffect, ...]  # what buys most comes first: the largest group, then the most bytes


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
    traces = model if isinstance(model, Traces) else Traces(model)

    def predictor_of(changed: TrainConfig) -> Predictor:
        setup = setup_of(changed, traces.config, device)
        return Predictor(setup, traces=traces, calibration=calibration)

    sizes = step_sizes(config, prompt_length=prompt_length)
    predictor = predictor_of(config)
    generations = largest_generations(predictor, sizes)
    if config.rollout.num_generations == "auto" and generations is not None:
        sizes = replace(sizes, generations=generations)
    prediction = predictor.predict(sizes)
    effects = []
    for knob in possible_knobs(config, prediction, predictor.shape) if knobs else ():
        changed = knob.change(config)
        other = predictor_of(changed)
        resized = step_sizes(changed, prompt_length=sizes.prompt_length)
        resized = replace(resized, generations=sizes.generations)
        then = other.predict(resized)
        saves = {phase: prediction.total(phase) - then.total(phase) for phase in PHASES}
        if max(saves.values()) > 0:
            effects.append(KnobEffect(knob, saves, largest_generations(other, resized)))
    effects.sort(key=lambda effect: (effect.num_generations or 0, max(effect.saves.values())), reverse=True)
    needed = prediction.parts["rollout"].get("KV cache", 0)
    return Plan(
        sizes=sizes,
        prediction=prediction,
        num_generations=generations,
        group_in_one_micro_batch=largest_undivided_group(predictor, sizes),
        micro_batch_tokens=largest_micro_batch_tokens(predictor, sizes),
        kv_cache_bytes=needed,
        kv_cache_room=needed + device.total - prediction.total("rollout"),
        knobs=tuple(effects),
    )


def largest_generations(predictor: Predictor, sizes: StepSizes) -> int | None:
    """Completions of a prompt for which the rollout, all in flight, and the update both fit.

    `MOST_GENERATIONS` where so many fit; None where two do not.
    """
    return largest(
        2, MOST_GENERATIONS, lambda count: predictor.predict(replace(sizes, generations=count)).fits
    )


def largest_undivided_group(predictor: Predictor, sizes: StepSizes) -> int | None:
    """Completions of a prompt whose update fits as one micro-batch; None where two do not."""

    def fits(count: int) -> bool:
        group = replace(sizes, generations=count)
        batch = undivided_group(group, share_prompts=predictor.setup.shares_prompts)
        return _update_fits(predictor.predict(group, batch))

    most = max(2, min(MOST_GENERATIONS, MOST_TOKENS // sizes.sequence_length))
    return largest(2, most, fits)


def largest_micro_batch_tokens(predictor: Predictor, sizes: StepSizes) -> int | None:
    """Input tokens of the largest micro-batch that fits, at most all of a step's.

    None where one completion does not fit.
    """

    def fits(tokens: int) -> bool:
        return _update_fits(predictor.predict(replace(sizes, micro_batch_tokens=tokens)))

    longest = sizes.sequence_length
    everything = longest * sizes.groups * sizes.generations
    return largest(longest, max(longest, min(everything, MOST_TOKENS)), fits)


def _update_fits(prediction: Prediction) -> bool:
    return prediction.total("update") <= prediction.device.total


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from `low` to `high` that fits, where none fits beyond one that does not."""
    if not fits(low):
        return None
    step = low
    while low < high and fits(min(low + step, high)):
        low = min(low + step, high)
        step *= 2
    above = min(low + step, high + 1)
    while above - low > 1:
        middle = (low + above) // 2
        low, above = (middle, above) if fits(middle) else (low, middle)
    return low
