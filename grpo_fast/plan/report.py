"""A plan for a person and for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_fast.distributed.config import DistributedConfig
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.exchange import HOP, NETWORK, REACHED_LINK
from grpo_fast.plan.prediction import PHASES, Phase, Prediction
from grpo_fast.plan.room import cheapest_change, turned_knobs, written
from grpo_fast.plan.scaling import SPREAD, Scaled
from grpo_fast.plan.search import MOST_GENERATIONS, Choice, Context, Plan, flow
from grpo_fast.plan.seconds import HOST_SECONDS, REACHED_BANDWIDTH, REACHED_FLOPS
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.plan.table import HOST, Cell
from grpo_fast.run_record.summary import bytes_text, duration_text

TURNS = (
    "turns: max_completion_length bounds the tokens of all, what tools and an environment say included, and "
    "so the bytes; seconds leave tools out; a completion that waits for one keeps no place in the KV cache: "
)
AGAIN = {
    "vllm": "what of it is evicted meanwhile is computed again",
    "transformers": "all of it is computed again, in a batch padded to the longest",
}


def render(plan: Plan) -> RenderableType:
    """Heading, parts by phase and mode, what fits, and what would make room."""
    predictor, sizes, prediction = plan.choice.predictor, plan.choice.sizes, plan.choice.prediction
    model, shape, batch = predictor.run.model, predictor.shape, prediction.micro_batch
    ranks, choices = prediction.device.ranks, (plan.choice, *plan.rivals)
    several = f", each of {ranks} ranks" if ranks > 1 else ""
    heading = (
        f"{model.path} in {model.dtype}: {sum(shape.parameters.values()):,} parameters, "
        f"{shape.narrow + shape.wide:,} trained\n"
        f"{prediction.device.name}, {bytes_text(prediction.device.total)}{several}: "
        f"{predictor.engine}, {predictor.attention}\n"
        f"{sizes.prompts} prompts, {sizes.generations} completions of each, up to {sizes.prompt_length} + "
        f"{sizes.completion_length} tokens\n"
        f"largest micro-batch: {batch.inputs:,} tokens, {batch.groups:.2g} groups, one of {batch.count}\n"
    )
    columns = [(choice.prediction, phase) for choice in choices for phase in PHASES]
    parts = _table("", *(f"{choice.mode} {phase}".strip() for choice in choices for phase in PHASES))
    held = (part for one, phase in columns for part in (*one.parts[phase], *one.offloaded))
    for part in dict.fromkeys(held):
        parts.add_row(part, *(_held(one, phase, part) for one, phase in columns))
    parts.add_section()
    parts.add_row("in all", *(bytes_text(one.total(phase)) for one, phase in columns), style="bold")
    if prediction.timed:
        fit = [(one, phase, one is prediction or one.free >= 0) for one, phase in columns]
        seconds = (duration_text(one.seconds[phase]) if fits else "-" for one, phase, fits in fit)
        parts.add_row("seconds of a step, estimated", *seconds)
        if ranks > 1:
            between = (duration_text(one.exchange[phase]) if fits else "-" for one, phase, fits in fit)
            parts.add_row("of these between ranks", *between)
    spare = bytes_text(abs(prediction.free))
    answers = (
        f"{f'fits, {spare} to spare' if prediction.free >= 0 else f'does not fit: {spare} too much'}\n"
        f"largest num_generations: {_size(plan.largest_generations)}{_a_step(plan.largest)}"
    )
    answers += f"\n{_longest(plan.search.largest_context(sizes.generations))}"
    if prediction.free < 0 and (change := cheapest_change(plan.search)):
        answers += f"\nthe cheapest change with which it fits: {written(change)}"
    answers = "\n".join([answers, *(_beside(plan.choice, rival) for rival in plan.rivals)])
    if plan.config.rollout.has_turns:
        answers += f"\n{TURNS}{AGAIN[predictor.engine]}"
    if ranks == 1 and plan.config.distributed != DistributedConfig():
        answers += "\ndistributed: read under torchrun alone; --gpus plans for several"
    settings = _table("setting", "value", "chosen by")
    for key, value in plan.choice.values.items():
        settings.add_row(key, flow(value), "hand" if key in plan.by_hand else "the plan")
    knobs = _table("what makes room", *(f"{phase} saves" for phase in PHASES), "largest group")
    knobs.add_column("price")
    for knob in (turned := turned_knobs(plan.search, plan.choice)):
        saves = (_cell(max(0, knob.saves[phase])) for phase in PHASES)
        knobs.add_row(knob.change, *saves, _size(knob.largest_num_generations, "-"), knob.cost)
    room: list[RenderableType] = [Text(""), knobs] if turned else []
    return Group(Text(heading), parts, Text(""), Text(answers), Text(""), settings, *room)


def render_scaling(steps: Sequence[Scaled], device: DeviceBudget) -> RenderableType:
    """Of a step on more and more GPUs, the seconds of each phase, and what they rest on."""
    phases = next((step.seconds for step in steps if step.seconds), {})
    table = _table("GPUs", *phases, "step, estimated", "efficiency", "mode")
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


def render_table(cells: Sequence[Cell], sizes: StepSizes) -> RenderableType:
    """`group · context` of each model and training by GPU, and what they rest on."""
    gpus = {cell.gpu: f"{cell.gpu}, {bytes_text(cell.bytes)}" for cell in cells}
    rows = _table("model", "training", *gpus.values())
    for index in range(0, len(cells), len(gpus)):
        first, *_ = row = cells[index : index + len(gpus)]
        rows.add_row(first.model, first.training, *map(_fitting, row))
    notes = (
        "\nlargest group · largest context in tokens; -: not even two completions fit\n"
        f"group: prompts of {sizes.prompt_length} tokens, completions of up to {sizes.completion_length:,}, "
        f"all of {sizes.prompts} prompts in one micro-batch; in several, any fits where a context does\n"
        f"context: of a prompt and its completion, {sizes.generations} of each prompt, whether or not the "
        "model has as many positions\n"
        f"assumed: as little at once as need be, a host with {HOST} times the GPU's memory, LoRA of rank 16\n"
        "predicted: tensors are counted, what libraries take besides is an allowance; nothing ran on a GPU"
    )
    return Group(rows, Text(notes))


def record(plan: Plan) -> dict[str, Any]:
    """The same as JSON takes it; all sizes in bytes, and of each rank."""
    choice, predictor, prediction = plan.choice, plan.choice.predictor, plan.choice.prediction
    shape, device = predictor.shape, prediction.device
    context = plan.search.largest_context(choice.sizes.generations)
    return {
        "model": predictor.run.model.path,
        "parameters": shape.parameters,
        "trainable_parameters": shape.narrow + shape.wide,
        "kv_bytes_per_token": shape.paged_kv_bytes_per_token,
        "device": {"name": device.name, "bytes": device.total},
        "engine": predictor.engine,
        "attention": predictor.attention,
        "step": asdict(choice.sizes),
        "values": choice.values,
        "by_hand": plan.by_hand,
        "parts": prediction.parts,
        "total": {phase: prediction.total(phase) for phase in PHASES},
        "allocated": {phase: prediction.allocated(phase) for phase in PHASES},
        "estimated_seconds": _seconds(choice),
        "ranks": device.ranks,
        "modes": {each.mode: _rank(each) for each in (choice, *plan.rivals) if each.mode},
        "offloaded": list(prediction.offloaded),
        "fits": prediction.free >= 0,
        "micro_batch": asdict(prediction.micro_batch),
        "largest_num_generations": plan.largest_generations,
        "estimated_seconds_of_largest": _seconds(plan.largest),
        "largest_context": asdict(context) if context else None,
        "cheapest_change": cheapest_change(plan.search),
        "knobs": [asdict(knob) for knob in turned_knobs(plan.search, choice)],
    }


def _rank(choice: Choice) -> dict[str, Any]:
    prediction = choice.prediction
    timed = {"estimated_seconds": _seconds(choice), "exchange_seconds": prediction.exchange}
    return {"parts": prediction.parts, "fits": prediction.free >= 0, "values": choice.values} | timed


def _held(prediction: Prediction, phase: Phase, part: str) -> str:
    size = prediction.parts[phase].get(part, 0)
    return "away" if part in prediction.offloaded and not size else _cell(size)


def _beside(choice: Choice, rival: Choice) -> str:
    """Why the one was chosen."""
    (short, own), (lacks, other) = choice.cost, rival.cost
    if lacks > short:
        return f"{choice.mode} is chosen: {rival.mode} needs {bytes_text(lacks - short)} more"
    return f"{choice.mode} is chosen: a completion takes {rival.mode} {other / own - 1:.0%} longer"


def _longest(context: Context | None) -> str:
    if context is None:
        return "longest completion with this group: not even one token fits"
    held = f"{context.tokens:,} tokens of prompt and completion, bound by {context.bound}"
    if context.positions and context.positions < context.tokens:
        held = f"{context.positions:,} tokens, the model's positions; the memory holds {held}"
    return f"longest with this group: {held}"


def _fitting(cell: Cell) -> str:
    more = "+" if cell.group == MOST_GENERATIONS else ""
    context = f" · {cell.context.tokens // 1000:,} K" if cell.context else ""
    return f"{cell.group:,}{more}{context}" if cell.group else f"-{context}"


def _table(name: str, *numbers: str) -> Table:
    table = Table(name, box=None, pad_edge=False)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _cell(size: int) -> str:
    return bytes_text(size) if size else "-"


def _seconds(choice: Choice | None) -> dict[Phase, float] | None:
    return choice.prediction.seconds if choice and choice.prediction.timed else None


def _a_step(choice: Choice | None) -> str:
    seconds = _seconds(choice)
    return f", then {duration_text(sum(seconds.values()))} a step, estimated" if seconds else ""


def _size(count: int | None, none: str = "not even 2 fit") -> str:
    if count is None:
        return none
    return f"{count:,}" + (" or more" if count == MOST_GENERATIONS else "")
