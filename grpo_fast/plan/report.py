"""The output of `grpo-fast plan`: a table or JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_fast.config.schema import TrainConfig, at
from grpo_fast.config.section import plural
from grpo_fast.plan.auto import with_constants
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.memory import PHASES
from grpo_fast.plan.model_shape import ModelShape
from grpo_fast.plan.search import MOST_GENERATIONS, Choice, Search, flow, modes, too_large
from grpo_fast.record.summary import bytes_text


@dataclass(frozen=True)
class Plan:
    """The choice for a run on a device."""

    config: TrainConfig
    search: Search
    choice: Choice  # if nothing fits, the smallest step

    @property
    def by_hand(self) -> list[str]:
        """Return the keys of `choice.values` that the configuration sets itself."""
        return [key for key in self.choice.values if at(self.config, key) not in ("auto", None)]


def plan(config: TrainConfig, shape: ModelShape, device: DeviceBudget) -> Plan:
    """Plan a run on a device, in mode replicate if it fits, else shard.

    Raises:
        ValueError: as `step_sizes` and `modes`.
    """
    tried = with_constants(config) if device.kind == "cpu" else config
    plans = []
    for divided in modes(tried, device.ranks, whole=device.kind == "cpu" or shape.quantized > 0):
        search = Search(divided, shape, device)
        plans.append(Plan(config, search, search.choose() or search.least()))
    return max(plans, key=lambda plan: min(0, plan.choice.free))


def render(plan: Plan) -> RenderableType:
    choice, shape, device = plan.choice, plan.search.shape, plan.search.device
    sizes, config = choice.sizes, plan.config
    ranks = f", each of {device.ranks} ranks" if device.ranks > 1 else ""
    counted = "counted" if shape.measured is None else f"measured, {shape.measured:.0%} of the counted"
    heading = (
        f"{config.model.path}: {shape.parameters:,} parameters, {shape.trained:,} trained\n"
        f"{device.name}, {bytes_text(device.total)}{ranks}; rollout engine: {choice.setup.engine.name}\n"
        f"{plural(sizes.prompts, 'prompt')}, {sizes.generations} completions of each, up to "
        f"{sizes.prompt_length} + {sizes.completion_length} tokens; activations: {counted}\n"
    )
    parts = _table("", *PHASES)
    for part in dict.fromkeys(part for phase in PHASES for part in choice.parts[phase]):
        parts.add_row(part, *(_size(choice.parts[phase].get(part, 0)) for phase in PHASES))
    parts.add_section()
    parts.add_row("total", *(bytes_text(choice.total(phase)) for phase in PHASES), style="bold")
    settings = _table("setting", "value", "set by")
    for key, value in choice.values.items():
        settings.add_row(key, flow(value), "configuration" if key in plan.by_hand else "the planner")
    return Group(heading, parts, Text(f"\n{_answers(plan)}\n"), settings)


def record(plan: Plan) -> dict[str, Any]:
    """Return the plan for JSON; sizes are in bytes, per rank."""
    choice, shape, device = plan.choice, plan.search.shape, plan.search.device
    return {
        "model": plan.config.model.path,
        "parameters": shape.parameters,
        "trainable_parameters": shape.trained,
        "measured": shape.measured,
        "device": {"name": device.name, "bytes": device.total, "ranks": device.ranks},
        "engine": choice.setup.engine.name,
        "step": asdict(choice.sizes),
        "values": choice.values,
        "by_hand": plan.by_hand,
        "parts": choice.parts,
        "total": {phase: choice.total(phase) for phase in PHASES},
        "fits": choice.free >= 0,
        "largest_num_generations": plan.search.largest_generations(),
    }


def _answers(plan: Plan) -> str:
    choice = plan.choice
    if choice.free < 0:
        return too_large(plan.search)
    group = plan.search.largest_generations()
    more = " or more" * (group == MOST_GENERATIONS)
    largest = f"{group:,}{more}" if group else "none"
    lines = [f"fits, {bytes_text(choice.free)} to spare", f"largest num_generations: {largest}"]
    if plan.config.rollout.has_turns:
        lines.append("max_completion_length bounds the tokens of all turns, tools' answers included")
    if choice.setup.device.ranks > 1:
        lines.append(f"distributed.mode: {choice.setup.config.distributed.mode}")
    return "\n".join(lines)


def _table(name: str, *columns: str) -> Table:
    table = Table(name, box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _size(size: int) -> str:
    return bytes_text(size) if size else "-"
