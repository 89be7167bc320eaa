"""A plan for a person and for a program."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_fast.plan.prediction import PHASES, Phase
from grpo_fast.plan.search import MOST_GENERATIONS, Choice, Plan, flow
from grpo_fast.run_record.summary import bytes_text, duration_text


def render(plan: Plan) -> RenderableType:
    """Heading, parts by phase, what fits, and what would make room."""
    predictor, sizes, prediction = plan.choice.predictor, plan.choice.sizes, plan.choice.prediction
    model, shape, batch = predictor.run.model, predictor.shape, prediction.micro_batch
    heading = (
        f"{model.path} in {model.dtype}: {sum(shape.parameters.values()):,} parameters, "
        f"{shape.narrow + shape.wide:,} trained\n"
        f"{prediction.device.name}, {bytes_text(prediction.device.total)}: {predictor.engine}, "
        f"{predictor.attention}\n"
        f"{sizes.prompts} prompts, {sizes.generations} completions of each, up to {sizes.prompt_length} + "
        f"{sizes.completion_length} tokens\n"
        f"largest micro-batch: {batch.inputs:,} tokens, {batch.groups:.2g} groups, one of {batch.count}\n"
    )
    parts = _table("", *PHASES)
    away = prediction.offloaded
    for part in dict.fromkeys((*prediction.parts["update"], *away, *prediction.parts["rollout"])):
        held = (prediction.parts[phase].get(part, 0) for phase in PHASES)
        parts.add_row(part, *("away" if part in away and not size else _cell(size) for size in held))
    parts.add_section()
    parts.add_row("in all", *(bytes_text(prediction.total(phase)) for phase in PHASES), style="bold")
    if seconds := _seconds(plan.choice):
        parts.add_row("seconds of a step, estimated", *(duration_text(seconds[phase]) for phase in PHASES))
    spare = bytes_text(abs(prediction.free))
    answers = (
        f"{f'fits, {spare} to spare' if prediction.free >= 0 else f'does not fit: {spare} too much'}\n"
        f"largest num_generations: {_size(plan.largest_generations)}{_a_step(plan.largest)}"
    )
    settings = _table("setting", "value", "chosen by")
    for key, value in plan.choice.values.items():
        settings.add_row(key, flow(value), "hand" if key in plan.by_hand else "the plan")
    knobs = _table("what makes room", *(f"{phase} saves" for phase in PHASES), "largest group")
    knobs.add_column("price")
    for knob in plan.knobs:
        saves = (_cell(max(0, knob.saves[phase])) for phase in PHASES)
        knobs.add_row(knob.change, *saves, _size(knob.largest_num_generations, "-"), knob.cost)
    room: list[RenderableType] = [Text(""), knobs] if plan.knobs else []
    return Group(Text(heading), parts, Text(""), Text(answers), Text(""), settings, *room)


def record(plan: Plan) -> dict[str, Any]:
    """The same as JSON takes it; all sizes in bytes."""
    choice, predictor, prediction = plan.choice, plan.choice.predictor, plan.choice.prediction
    shape, device = predictor.shape, prediction.device
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
        "offloaded": list(prediction.offloaded),
        "fits": prediction.free >= 0,
        "micro_batch": asdict(prediction.micro_batch),
        "largest_num_generations": plan.largest_generations,
        "estimated_seconds_of_largest": _seconds(plan.largest),
        "knobs": [asdict(knob) for knob in plan.knobs],
    }


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
