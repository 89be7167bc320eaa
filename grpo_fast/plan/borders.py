"""From where on another mode wins, in GPUs and in the model's size: each place is planned."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, takewhile

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.model_shape import with_layers
from grpo_fast.plan.search import plan
from grpo_fast.plan.trace import Traces

RANKS = (2, 4, 8, 16, 32, 64)
LAYERS = {"replicate": (1, 2, 4), "shard": (0.25, 0.5, 1)}
"""In units of the model's, where the other of the modes may win."""


def borders(config: TrainConfig, traces: Traces, device: DeviceBudget, prompt_length: int) -> list[str]:
    """Which mode wins on how many GPUs, and with how many layers on these; nothing for one rank or mode only.

    Raises:
        ValueError: as `plan`.
    """
    if device.ranks == 1 or config.distributed.mode != "auto":
        return []

    def winner(model: Traces, device: DeviceBudget) -> str:
        choice = plan(config, model, device, prompt_length=prompt_length).choice
        return choice.predictor.run.distributed.mode if choice.prediction.free >= 0 else "neither fits"

    counts = takewhile(lambda ranks: ranks <= config.prompts_per_step, RANKS)
    by_ranks = [(f"{ranks}", winner(traces, replace(device, ranks=ranks))) for ranks in counts]
    layers = traces.config.get_text_config().num_hidden_layers
    sizes = []
    way = LAYERS.get(winner(traces, device), LAYERS["shard"])
    for count in dict.fromkeys(max(1, round(times * layers)) for times in way):
        model = Traces(with_layers(traces.config, count))
        parameters = sum(model.shape(config.model).parameters.values())
        sizes.append((f"{count} ({parameters / 1e9:.2g} B parameters)", winner(model, device)))
    return [f"by GPUs: {_ranges(by_ranks)}", f"by layers, on {device.ranks} GPUs: {_ranges(sizes)}"]


def _ranges(winners: list[tuple[str, str]]) -> str:
    """`2 to 8 replicate, 16 shard`"""
    found = []
    for mode, places in groupby(winners, key=lambda winner: winner[1]):
        first, *_, last = [place for place, _ in places] * 2
        found.append(f"{first if first == last else f'{first} to {last}'} {mode}")
    return ", ".join(found)
