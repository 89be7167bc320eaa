"""A step on more and more GPUs: what a rank computes and exchanges, and how long it waits for the slowest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from grpo_fast.config.schema import TrainConfig
from grpo_fast.plan.devices import TABLES, DeviceBudget
from grpo_fast.plan.model_shape import Shapes
from grpo_fast.plan.prediction import Prediction
from grpo_fast.plan.report import table_of
from grpo_fast.plan.search import plan, with_values
from grpo_fast.plan.seconds import HOP, NETWORK, REACHED_BANDWIDTH, REACHED_FLOPS, REACHED_LINK

SPREAD = 0.41  # standard deviation of the logarithm of a length, as of GSM8K's answers (lengths_gsm8k.json)

EXCHANGED_SECONDS = 2e-7  # in which a rank reads a token of all ranks' completions. Measured on one CPU core.


@dataclass(frozen=True)
class Scaled:
    """A step on so many GPUs."""

    gpus: int
    mode: str  # empty on one
    seconds: dict[str, float]  # by phase, see `step_seconds`; empty where the run does not fit
    efficiency: float  # GPU-seconds on the fewest GPUs that it fits / on these


def scaling(config: TrainConfig, shapes: Shapes, devices: Sequence[DeviceBudget]) -> list[Scaled]:
    """The same step on each of `devices`, which differ in their number of ranks, the fewest first.

    Raises:
        ValueError: nothing is published of the device's speed in the model's dtype, or as `plan`.
    """
    generations = plan(config, shapes, devices[-1]).choice.sizes.generations
    config = with_values(config, {"rollout.num_generations": generations})
    choices = [plan(config, shapes, device).choice for device in devices]
    predictor = choices[0].predictor
    if not predictor.timed:
        raise ValueError(
            f"how a step scales on {devices[0].name} in {predictor.run.model.dtype} is not known: give a GPU "
            f"with published speeds, {', '.join(TABLES['gpus'])}, and model.dtype = bfloat16"
        )
    steps = [step_seconds(choice) if choice.free >= 0 else {} for choice in choices]
    costs = [device.ranks * sum(step.values()) for device, step in zip(devices, steps, strict=True)]
    least = next(filter(None, costs), 0.0)
    return [
        Scaled(choice.predictor.device.ranks, choice.mode, step, least / cost if cost else 0.0)
        for choice, step, cost in zip(choices, steps, costs, strict=True)
    ]


def step_seconds(choice: Prediction) -> dict[str, float]:
    """By phase, of ranks whose completions are at their longest.

    The update is dealt evenly; each rank answers prompts of its own. Their tokens are about normal, and half
    of a length's variance is its prompt's, so that the slowest of R ranks is sqrt(2 ln R) standard deviations
    beyond the mean.
    """
    sizes, ranks = choice.sizes, choice.predictor.device.ranks
    between, tokens = choice.exchange, ranks * sizes.completions * sizes.completion_length
    rollout, update = (choice.seconds[phase] - between[phase] for phase in ("rollout", "update"))
    spread = SPREAD * math.sqrt((1 + 1 / sizes.generations) / 2 / sizes.prompts)
    return {
        "rollout": rollout,
        "update": update,
        "communication": sum(between.values()),
        "exchange": EXCHANGED_SECONDS * tokens * (ranks > 1),
        "waiting": rollout * spread * math.sqrt(2 * math.log(ranks)),
    }


def render_scaling(steps: Sequence[Scaled], device: DeviceBudget) -> RenderableType:
    """Of a step on more and more GPUs, the seconds of each phase, and what they rest on."""
    phases = next((step.seconds for step in steps if step.seconds), {})
    table = table_of("GPUs", *phases, "step, estimated", "efficiency", "mode")
    for step in steps:
        seconds = (f"{value:.2f}" for value in (*step.seconds.values(), sum(step.seconds.values())))
        values = (*seconds, f"{step.efficiency:.0%}") if step.seconds else ["-"] * (len(phases) + 2)
        table.add_row(f"{step.gpus}", *values, step.mode if step.seconds else "does not fit")
    rates = f"{device.flops / 1e12:.0f} TFLOP/s, {device.bandwidth / 1e9:.0f} GB/s of memory"
    notes = (
        f"\npublished: {device.name}'s {rates}, {device.link / 1e9:.0f} GB/s to the GPUs of its node\n"
        f"assumed: {REACHED_FLOPS:.0%}, {REACHED_BANDWIDTH:.0%} and {REACHED_LINK:.0%} of these; "
        f"{NETWORK / 1e9:.0f} GB/s a GPU between nodes; {HOP * 1e6:.0f} us a hop; completions at "
        f"their longest, but for waiting: lengths log-normal, sigma {SPREAD}, half of the variance the "
        "prompt's\n"
        "measured, on one CPU core: the exchange of the groups\n"
        "left out: rewards; a GPU is taken to compute nothing while it communicates"
    )
    return Group(table, Text(notes))
