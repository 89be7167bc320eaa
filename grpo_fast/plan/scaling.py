"""A step on more and more GPUs, simulated with completions of uneven lengths and ranks that wait."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from grpo_fast.config import TrainConfig
from grpo_fast.distributed.world import World
from grpo_fast.plan.devices import TABLES, DeviceBudget
from grpo_fast.plan.prediction import Prediction
from grpo_fast.plan.report import table_of
from grpo_fast.plan.search import plan, with_values
from grpo_fast.plan.seconds import (
    HOP,
    HOST_SECONDS,
    NETWORK,
    REACHED_BANDWIDTH,
    REACHED_FLOPS,
    REACHED_LINK,
    SLEEP_SECONDS,
    prefill_seconds,
    sync_seconds,
    token_seconds,
    transfer_seconds,
    update_exchange,
    update_seconds,
)
from grpo_fast.plan.sizes import Work
from grpo_fast.plan.trace import Traces
from grpo_fast.policy.packing import TokenCosts, assign_to_ranks
from grpo_fast.table import Completions

Lengths = Sequence[Sequence[int]]
"""Tokens of each prompt's completions."""

SPREAD = 0.41  # standard deviation of the logarithm of a length, as of GSM8K's answers (lengths_gsm8k.json)

EXCHANGED_SECONDS = 2e-7  # in which a rank reads a token of all ranks' completions. Measured on one CPU core.


@dataclass(frozen=True)
class Scaled:
    """A step on so many GPUs."""

    gpus: int
    mode: str  # empty on one
    seconds: dict[str, float]  # by phase, see `step_seconds`; empty where the run does not fit
    efficiency: float  # GPU-seconds on the fewest GPUs that it fits / on these


def scaling(
    config: TrainConfig,
    traces: Traces,
    devices: Sequence[DeviceBudget],
    *,
    prompt_length: int,
) -> list[Scaled]:
    """The same step on each of `devices`, which differ in their number of ranks, the fewest first.

    Raises:
        ValueError: nothing is published of the device's speed in the model's dtype, or as `plan`.
    """
    generations = plan(config, traces, devices[-1], prompt_length=prompt_length).choice.sizes.generations
    config = with_values(config, {"rollout.num_generations": generations})
    choices = [plan(config, traces, device, prompt_length=prompt_length).choice for device in devices]
    predictor = choices[0].predictor
    if not predictor.timed:
        raise ValueError(
            f"how a step scales on {devices[0].name} in {predictor.run.model.dtype} is not known: give a GPU "
            f"with published speeds, {', '.join(TABLES['gpus'])}, and model.dtype = bfloat16"
        )
    limit = choices[0].sizes.completion_length
    lengths = drawn_lengths((config.prompts_per_step, generations), limit, config.seed)
    steps = [step_seconds(c, lengths) if c.free >= 0 else {} for c in choices]
    costs = [device.ranks * sum(step.values()) for device, step in zip(devices, steps, strict=True)]
    least = next(filter(None, costs), 0.0)
    return [
        Scaled(choice.predictor.device.ranks, choice.mode, step, least / cost if cost else 0.0)
        for choice, step, cost in zip(choices, steps, costs, strict=True)
    ]


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
        f"{NETWORK / 1e9:.0f} GB/s a GPU between nodes; {HOP * 1e6:.0f} us a hop; at least "
        f"{HOST_SECONDS['vllm'] * 1e3:.0f} ms a decoded token; lengths log-normal, sigma {SPREAD}, half of "
        "the variance the prompt's\n"
        "measured, on one CPU core: the exchange of the groups\n"
        "left out: rewards; a GPU is taken to compute nothing while it communicates"
    )
    return Group(table, Text(notes))


def drawn_lengths(shape: tuple[int, int], limit: int, seed: int) -> Lengths:
    """(prompts, completions of each) tokens, log-normal about half the limit and at most it.

    Half of the variance is the prompt's, whose completions are long together.
    """
    generator, spread = np.random.default_rng(seed), SPREAD / math.sqrt(2)
    normal = generator.normal(size=(shape[0], 1)) + generator.normal(size=shape)
    return np.clip(limit / 2 * np.exp(spread * normal), 1, limit).astype(int).tolist()


def step_seconds(choice: Prediction, lengths: Lengths) -> dict[str, float]:
    """Of a step with completions of these lengths: rollout and update are the ranks' means, and `waiting` is
    what the slowest takes more; communication is of GPUs, the exchange of groups of their hosts."""
    predictor, tokens = choice.predictor, sum(map(sum, lengths))
    run, device = predictor.run, predictor.device
    rollouts = [decoded(choice, World(rank, device.ranks).share(lengths)) for rank in range(device.ranks)]
    works = [dealt(choice, lengths[part :: run.minibatches]) for part in range(run.minibatches)]
    updates = [[update_seconds(predictor, work) for work in each] for each in works]
    count = fmean(each[0].count for each in works)
    batch = Work(0, 0, targets=int(tokens / (device.ranks * run.minibatches * count)), count=count)
    return {
        "rollout": fmean(rollouts),
        "update": sum(map(fmean, updates)) + transfer_seconds(predictor),
        "communication": update_exchange(predictor, batch) + sync_seconds(predictor),
        "exchange": EXCHANGED_SECONDS * tokens * (device.ranks > 1),
        "waiting": sum(max(phase) - fmean(phase) for phase in (rollouts, *updates)),
    }


def decoded(choice: Prediction, lengths: Lengths) -> float:
    """Seconds in which a rank's engine answers its prompts; what is in flight falls as completions end."""
    predictor, sizes, prompt = choice.predictor, choice.sizes, choice.sizes.prompt_length
    waiting = [length for row in reversed(lengths) for length in reversed(row)]
    ends: list[tuple[int, int]] = []  # (the token at which it ends, its length) of each in flight
    most, now, held = predictor.rows_in_flight(sizes), 0, 0
    seconds = prefill_seconds(predictor, replace(sizes, prompts=len(lengths)))
    while waiting or ends:
        while waiting and len(ends) < most:
            length = waiting.pop()
            heapq.heappush(ends, (now + length, length))
            held += prompt
        tokens, rows = ends[0][0] - now, len(ends)
        seen = (held + rows * tokens // 2) // rows
        seconds += tokens * token_seconds(predictor, seen, rows)
        now, held = now + tokens, held + rows * tokens
        while ends and ends[0][0] == now:
            held -= prompt + heapq.heappop(ends)[1]
    return seconds + SLEEP_SECONDS * predictor.sleeps


def dealt(choice: Prediction, lengths: Lengths) -> list[Work]:
    """What each rank computes of one optimiser step, in as many micro-batches as the rank with the most."""
    predictor, prompt = choice.predictor, choice.sizes.prompt_length
    shape, ranks = predictor.shape, predictor.device.ranks
    ids = (0,) * prompt
    rows = [(group, n) for group, row in enumerate(lengths) for n in row]
    table = Completions.of([ids] * len(rows), [(0,) * n for _, n in rows], [group for group, _ in rows])
    costs = TokenCosts(shape.active, shape.vocabulary * shape.hidden, 2 * shape.hidden * len(shape.layers))
    works = []
    for numbers in assign_to_ranks(table, ranks, costs):
        own: dict[int, list[int]] = {}
        for group, n in (rows[i] for i in numbers):
            own.setdefault(group, []).append(n)
        works.append(_work(own.values(), prompt, choice.sizes.micro_batch_tokens))
    count = max(work.count for work in works)
    return [replace(work, count=count) for work in works]


def _work(groups: Iterable[Sequence[int]], prompt: int, budget: int) -> Work:
    """Of groups' completions, which share a prompt as often as a micro-batch has room for them."""
    inputs = pairs = targets = 0
    for lengths in groups:
        held = sum(lengths) - len(lengths)  # a completion's last token is a target only
        documents = -(-held // max(1, budget - prompt))
        inputs += documents * prompt + held
        pairs += documents * prompt * (prompt + 1) // 2
        pairs += sum((n - 1) * (2 * prompt + n) // 2 for n in lengths)
        targets += sum(lengths)
    return Work(inputs, pairs, targets, max(1, -(-inputs // budget)))
