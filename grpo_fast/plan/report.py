"""A plan for a person and for a program, and the table of which model trains on which GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_fast.config.distributed import DistributedConfig
from grpo_fast.config.policy import LoraConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.model_shape import Shapes, model_config
from grpo_fast.plan.prediction import PHASES, Phase, Prediction
from grpo_fast.plan.room import cheapest_change, memory_options
from grpo_fast.plan.search import MOST_GENERATIONS, Context, Plan, Search, flow, with_values, written
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.record.summary import bytes_text, duration_text

MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B")
GPUS = ("RTX-4080", "RTX-4090", "A100-40", "H100", "H200")
HOST = 2  # memory of the host, times the GPU's

_ADAPTERS = {"model.lora": LoraConfig().model_dump(), "rollout.vllm.lora_sync": "adapter"}
TRAININGS: dict[str, dict[str, Any]] = {
    "full": {"model.lora": None, "model.quantization": None},
    "LoRA": _ADAPTERS | {"model.quantization": None},
    "QLoRA": _ADAPTERS | {"model.quantization": "nf4"},
}

TURNS = (
    "turns: max_completion_length bounds the tokens of all, what tools and an environment say included, and "
    "so the bytes; seconds leave tools out; a completion that waits for one keeps no place in the KV cache: "
)


@dataclass(frozen=True)
class Cell:
    """What fits of one model, trained in one way, on one GPU."""

    model: str
    training: str
    gpu: str
    bytes: int  # of the GPU
    group: int | None  # completions of a prompt in one micro-batch; None: not even two
    context: Context | None  # None: not even one token of a completion


def render(plan: Plan) -> RenderableType:
    """Heading, parts by phase and mode, what fits, and what would make room."""
    settings = table_of("setting", "value", "chosen by")
    for key, value in plan.choice.values.items():
        settings.add_row(key, flow(value), "hand" if key in plan.by_hand else "the plan")
    heading, answers = Text(_heading(plan.choice)), Text(_answers(plan))
    shown: list[RenderableType] = [heading, _parts(plan), Text(""), answers, Text(""), settings]
    knobs = table_of("what makes room", *(f"{phase} saves" for phase in PHASES))
    knobs.add_column("price")
    for knob in memory_options(plan):
        saves = (_cell(max(0, knob.saves[phase])) for phase in PHASES)
        knobs.add_row(knob.change, *saves, knob.cost)
    if knobs.row_count:
        shown += [Text(""), knobs]
    return Group(*shown)


def record(plan: Plan) -> dict[str, Any]:
    """The same as JSON takes it; all sizes in bytes, and of each rank."""
    choice, predictor = plan.choice, plan.choice.predictor
    shape, device = predictor.shape, predictor.device
    context = plan.search.largest_context(choice.sizes.generations)
    return {
        "model": predictor.run.model.path,
        "parameters": shape.parameters,
        "active_parameters": shape.active,
        "trainable_parameters": shape.trained,
        "kv_bytes_per_token": shape.paged_kv_bytes_per_token,
        "device": {"name": device.name, "bytes": device.total},
        "engine": predictor.engine.name,
        "attention": predictor.attention,
        "step": asdict(choice.sizes),
        "values": choice.values,
        "by_hand": plan.by_hand,
        "parts": choice.parts,
        "total": {phase: choice.total(phase) for phase in PHASES},
        "allocated": {phase: choice.allocated(phase) for phase in PHASES},
        "estimated_seconds": _seconds(choice),
        "ranks": device.ranks,
        "modes": {
            each.mode: {
                "parts": each.parts,
                "fits": each.free >= 0,
                "values": each.values,
                "estimated_seconds": _seconds(each),
                "exchange_seconds": each.exchange,
            }
            for each in (choice, *plan.rivals)
            if each.mode
        },
        "offloaded": list(predictor.offloaded),
        "fits": choice.free >= 0,
        "micro_batch": asdict(choice.micro_batch),
        "largest_num_generations": plan.largest_generations,
        "estimated_seconds_of_largest": plan.largest and _seconds(plan.largest),
        "largest_context": asdict(context) if context else None,
        "cheapest_change": cheapest_change(plan.search),
        "knobs": [asdict(knob) for knob in memory_options(plan)],
    }


def table(config: TrainConfig, models: Sequence[str], gpus: Sequence[str]) -> Iterator[Cell]:
    """Of every model each training, and of this each GPU; the context is that of the group of `config`.

    Raises:
        ValueError: an unknown model or GPU, or as `Search`.
    """
    devices = [device_budget(gpu) for gpu in gpus]
    for model in models:
        shapes = Shapes(model_config(model))
        for training, values in TRAININGS.items():
            run = with_values(config, values | {"model.path": model})
            for device in devices:
                budget = replace(device, host=HOST * device.total)
                search = Search(run, shapes, budget)
                group = search.largest_generations(at_once=True)
                context = search.largest_context(search.sizes.generations)
                yield Cell(model, training, device.name, device.total, group, context)


def render_table(cells: Sequence[Cell], sizes: StepSizes) -> RenderableType:
    """`group · context` of each model and training by GPU, and the assumptions."""
    gpus = {cell.gpu: f"{cell.gpu}, {bytes_text(cell.bytes)}" for cell in cells}
    rows = table_of("model", "training", *gpus.values())
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


def _fitting(cell: Cell) -> str:
    more = "+" if cell.group == MOST_GENERATIONS else ""
    context = f" · {cell.context.tokens // 1000:,} K" if cell.context else ""
    return f"{cell.group:,}{more}{context}" if cell.group else f"-{context}"


def table_of(name: str, *numbers: str) -> Table:
    table = Table(name, box=None, pad_edge=False)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _heading(choice: Prediction) -> str:
    predictor, sizes, batch = choice.predictor, choice.sizes, choice.micro_batch
    model, shape, device = predictor.run.model, predictor.shape, predictor.device
    several = f", each of {device.ranks} ranks" if device.ranks > 1 else ""
    visited = f" (a token visits {shape.active:,} in the layers)" if "experts" in shape.parameters else ""
    return (
        f"{model.path} in {model.dtype}: {sum(shape.parameters.values()):,} parameters{visited}, "
        f"{shape.trained:,} trained\n"
        f"{device.name}, {bytes_text(device.total)}{several}: {predictor.engine.name}, "
        f"{predictor.attention}\n"
        f"{sizes.prompts} prompts, {sizes.generations} completions of each, up to {sizes.prompt_length} + "
        f"{sizes.completion_length} tokens\n"
        f"largest micro-batch: {batch.inputs:,} tokens, {batch.groups:.2g} groups, one of {batch.count}\n"
    )


def _parts(plan: Plan) -> Table:
    """Bytes and seconds, a column for each phase of each mode."""
    choices = (plan.choice, *plan.rivals)
    columns = [(choice, phase) for choice in choices for phase in PHASES]
    table = table_of("", *(f"{choice.mode} {phase}".strip() for choice, phase in columns))
    held = (part for one, phase in columns for part in (*one.parts[phase], *one.predictor.offloaded))
    for part in dict.fromkeys(held):
        table.add_row(part, *(_held(one, phase, part) for one, phase in columns))
    table.add_section()
    table.add_row("in all", *(bytes_text(one.total(phase)) for one, phase in columns), style="bold")
    if plan.choice.predictor.timed:
        fit = [(one, phase, one is plan.choice or one.free >= 0) for one, phase in columns]
        seconds = (duration_text(one.seconds[phase]) if fits else "-" for one, phase, fits in fit)
        table.add_row("seconds of a step, estimated", *seconds)
        if plan.choice.mode:
            between = (duration_text(one.exchange[phase]) if fits else "-" for one, phase, fits in fit)
            table.add_row("of these between ranks", *between)
    return table


def _answers(plan: Plan) -> str:
    """A line for each: whether it fits, what would, and why so."""
    choice, config = plan.choice, plan.config
    spare = bytes_text(abs(choice.free))
    largest = "largest num_generations: not even 2 fit"
    if plan.largest:
        count, seconds = plan.largest.sizes.generations, _seconds(plan.largest)
        largest = f"largest num_generations: {count:,}" + " or more" * (count == MOST_GENERATIONS)
        largest += f", then {duration_text(sum(seconds.values()))} a step, estimated" if seconds else ""
    lines = [f"fits, {spare} to spare" if choice.free >= 0 else f"does not fit: {spare} too much", largest]
    lines.append(_longest(plan.search.largest_context(choice.sizes.generations)))
    if choice.free < 0 and (change := cheapest_change(plan.search)):
        lines.append(f"the cheapest change with which it fits: {written(change)}")
    (short, own) = choice.cost
    for rival in plan.rivals:
        lacks, other = rival.cost
        why = f"a completion takes {rival.mode} {other / own - 1:.0%} longer"
        if lacks > short:
            why = f"{rival.mode} needs {bytes_text(lacks - short)} more"
        lines.append(f"{choice.mode} is chosen: {why}")
    if config.rollout.has_turns:
        lines.append(TURNS + choice.predictor.engine.after_a_tool)
    if not choice.mode and config.distributed != DistributedConfig():
        lines.append("distributed: read under torchrun alone; --gpus plans for several")
    return "\n".join(lines)


def _longest(context: Context | None) -> str:
    if context is None:
        return "longest completion with this group: not even one token fits"
    held = f"{context.tokens:,} tokens of prompt and completion, bound by {context.bound}"
    if context.positions and context.positions < context.tokens:
        held = f"{context.positions:,} tokens, the model's positions; the memory holds {held}"
    return f"longest with this group: {held}"


def _held(choice: Prediction, phase: Phase, part: str) -> str:
    size = choice.parts[phase].get(part, 0)
    return "away" if part in choice.predictor.offloaded and not size else _cell(size)


def _cell(size: int) -> str:
    return bytes_text(size) if size else "-"


def _seconds(choice: Prediction) -> dict[Phase, float] | None:
    return choice.seconds if choice.predictor.timed else None
