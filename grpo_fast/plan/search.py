"""What fits: the largest micro-batch, the largest group, the room for keys and values, and what buys more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.knobs import Knob, possible_knobs
from grpo_fast.plan.micro_batch import whole_group
from grpo_fast.plan.prediction import Calibration, Phase, Prediction, Predictor
from grpo_fast.plan.setup import Workload, setup_of, workload_of
from grpo_fast.plan.traces import Traces

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_GENERATIONS = 4096  # where the search for a group's size ends
MOST_TOKENS = 1 << 20  # and that for a micro-batch's


@dataclass(frozen=True)
class KnobEffect:
    """What one change would do."""

    knob: Knob
    saves: dict[Phase, int]  # bytes; negative where it costs some
    num_generations: int | None  # the largest that then fits; None: not even two


@dataclass(frozen=True)
class Plan:
    """A prediction, and what else would fit."""

    work: Workload
    prediction: Prediction
    num_generations: int | None  # the largest for which both phases fit; None: not even two
    group_in_one_micro_batch: int | None  # the largest group whose update fits undivided
    micro_batch_tokens: int | None  # the largest micro-batch that fits; None: not even one completion
    kv_cache_bytes: int  # that the completions of a step need at once
    kv_cache_room: int  # that the device has for them beside everything else
    knobs: tuple[KnobEffect, ...]  # what buys most comes first: the largest group, then the most bytes


def predict(
    config: TrainConfig,
    model_config: PretrainedConfig,
    device: DeviceBudget,
    *,
    prompt_length: int | None = None,
    calibration: Calibration | None = None,
) -> Prediction:
    """Bytes of a run's step by part and phase.

    Args:
        model_config: of the model that `config.model.path` names; no weights are read.
        prompt_length: tokens of the longest prompt; by default `dataset.max_prompt_length`.

    Raises:
        ValueError: the prompts' length is not known, or the model cannot be packed.
    """
    predictor = Predictor(setup_of(config, model_config, device), calibration=calibration)
    return predictor.predict(workload_of(config, prompt_length=prompt_length))


def plan(
    config: TrainConfig,
    model: PretrainedConfig | Traces,
    device: DeviceBudget,
    *,
    prompt_length: int | None = None,
    calibration: Calibration | None = None,
    knobs: bool = True,
) -> Plan:
    """What of a run fits on a device, and with `knobs`, what would make room.

    With `num_generations: auto` the plan is for the largest group that fits, or for the smallest where none
    does.

    Args:
        model: configuration of the model that `config.model.path` names, or its traces, if there are any.
        prompt_length: tokens of the longest prompt; by default `dataset.max_prompt_length`.

    Raises:
        ValueError: as `predict`.
    """
    traces = model if isinstance(model, Traces) else Traces(model)
    model_config = traces.config
    work = workload_of(config, prompt_length=prompt_length)
    predictor = Predictor(setup_of(config, model_config, device), traces=traces, calibration=calibration)
    generations = largest_generations(predictor, work)
    if config.rollout.num_generations == "auto" and generations is not None:
        work = replace(work, generations=generations)
    prediction = predictor.predict(work)
    needed = prediction.parts["rollout"].get("KV cache", 0)
    effects = []
    for knob in possible_knobs(config, prediction, predictor.shape) if knobs else ():
        changed = knob.change(config)
        setup, sizes = setup_of(changed, model_config, device), _resized(changed, work)
        other = Predictor(setup, traces=traces, calibration=calibration)
        then = other.predict(sizes)
        saves = {phase: prediction.total(phase) - then.total(phase) for phase in prediction.parts}
        if max(saves.values()) > 0:
            effects.append(KnobEffect(knob, saves, largest_generations(other, sizes)))
    return Plan(
        work=work,
        prediction=prediction,
        num_generations=generations,
        group_in_one_micro_batch=largest_undivided_group(predictor, work),
        micro_batch_tokens=largest_micro_batch_tokens(predictor, work),
        kv_cache_bytes=needed,
        kv_cache_room=needed + device.total - prediction.total("rollout"),
        knobs=tuple(sorted(effects, key=_bought, reverse=True)),
    )


def largest_generations(predictor: Predictor, work: Workload) -> int | None:
    """Completions of a prompt for which the rollout, all in flight, and the update both fit.

    `MOST_GENERATIONS` where so many fit; None where two do not.
    """
    return largest(
        2, MOST_GENERATIONS, lambda count: predictor.predict(replace(work, generations=count)).fits
    )


def largest_undivided_group(predictor: Predictor, work: Workload) -> int | None:
    """Completions of a prompt whose update fits as one micro-batch; None where two do not."""

    def fits(count: int) -> bool:
        sizes = replace(work, generations=count)
        batch = whole_group(sizes, share_prompts=predictor.setup.shares_prompts)
        return _update_fits(predictor.predict(sizes, batch))

    most = max(2, min(MOST_GENERATIONS, MOST_TOKENS // work.sequence_length))
    return largest(2, most, fits)


def largest_micro_batch_tokens(predictor: Predictor, work: Workload) -> int | None:
    """Input tokens of the largest micro-batch that fits, at most all of a step's.

    None where one completion does not fit.
    """

    def fits(tokens: int) -> bool:
        return _update_fits(predictor.predict(replace(work, micro_batch_tokens=tokens)))

    longest = work.sequence_length
    everything = longest * -(-work.prompts // work.minibatches) * work.generations
    return largest(longest, max(longest, min(everything, MOST_TOKENS)), fits)


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


def _bought(effect: KnobEffect) -> tuple[int, int]:
    return effect.num_generations or 0, max(effect.saves.values())


def _update_fits(prediction: Prediction) -> bool:
    return prediction.total("update") <= prediction.device.total


def _resized(config: TrainConfig, work: Workload) -> Workload:
    """The sizes of a changed run, with the group and prompts of `work`."""
    sizes = workload_of(config, prompt_length=work.prompt_length)
    return replace(sizes, generations=work.generations)
