"""What makes room: each change of the configuration that does, and the cheapest with which a run fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from grpo_fast.config.policy import LoraConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.plan.prediction import PHASES, Phase, Predictor
from grpo_fast.plan.search import Plan, Search, with_values, written


@dataclass(frozen=True)
class Knob:
    """One change of the configuration that trades something for memory, and what it would do."""

    change: str  # as it is written on the command line
    saves: dict[Phase, int]  # bytes; negative where it costs some
    cost: str


def memory_options(plan: Plan) -> tuple[Knob, ...]:
    """Those that would save anything, were all else as it is chosen; what saves most comes first."""
    search, choice = plan.search, plan.choice
    found = []
    for values, cost in _possible_knobs(search.config, choice.predictor):
        sizes = replace(
            choice.sizes,
            prompts=_changed(search, values).sizes.prompts,
            micro_batch_tokens=values.get("micro_batch_tokens", choice.sizes.micro_batch_tokens),
        )
        run = with_values(choice.predictor.run, values)
        then = Predictor(run, search.shapes, search.device).predict(sizes)
        saves = {phase: choice.total(phase) - then.total(phase) for phase in PHASES}
        if max(saves.values()) > 0:
            found.append(Knob(written(values), saves, cost))
    return tuple(sorted(found, key=lambda knob: max(knob.saves.values()), reverse=True))


def cheapest_change(search: Search) -> dict[str, Any] | None:
    """Of the configuration, with which its smallest step fits: values by key. None: no change does.

    One change is added to the other by price, and what is not needed beside the dearest is taken back.
    """
    made: dict[str, Any] = {}
    while not _fits(changed := _changed(search, made)):
        knob = next(_possible_knobs(changed.config, changed.least().predictor), None)
        if knob is None:
            return None
        made |= knob[0]
    for key in [*made][-2::-1]:
        rest = {other: value for other, value in made.items() if other != key}
        with suppress(ValueError):  # 4 bits without adapters
            made = rest if _fits(_changed(search, rest)) else made
    return made


def _fits(search: Search) -> bool:
    return search.least().free >= 0


def _changed(search: Search, values: Mapping[str, Any]) -> Search:
    """With other values of some dotted keys."""
    return replace(search, config=with_values(search.config, values))


def _possible_knobs(config: TrainConfig, predictor: Predictor) -> Iterator[tuple[dict[str, Any], str]]:
    """(values, cost) of what the configuration has not turned yet, nor leaves to the plan; by price."""
    model, vllm, kind = config.model, config.rollout.vllm, config.optimizer.kind
    if predictor.engine.name == "vllm":
        if vllm.share_weights is False:
            yield {"rollout.vllm.share_weights": "auto"}, "nothing"
        if vllm.sleep_level == 0:
            yield {"rollout.vllm.sleep_level": "auto"}, "milliseconds at every step"
    if config.memory.offload != "auto" and predictor.on_gpu and predictor.offloaded != predictor.parts:
        yield {"memory.offload": list(predictor.parts)}, "copies at every step"
    if predictor.engine.name == "vllm" and not predictor.weights.shared and model.lora is not None:
        yield {"rollout.vllm.lora_sync": "adapter"}, "LoRA kernels while decoding"
    if model.gradient_checkpointing in (False, "mlp"):
        yield {"model.gradient_checkpointing": True}, "a second forward of every layer"
    if model.gradient_checkpointing is True and predictor.on_gpu:
        yield {"model.gradient_checkpointing": "offload"}, "copies of every layer's input"
    if kind == "adamw":
        yield {"optimizer.kind": "adamw_8bit"}, "moments of 8 bits"
    if predictor.run.model.dtype == "bfloat16" and not config.optimizer.stochastic_rounding:
        yield {"optimizer.stochastic_rounding": True}, "chance in the weights' last bit, no masters"
    if predictor.run.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}, "weights of 16 bits"
    if config.loss.needs_reference and model.lora is None:
        yield {"loss.beta": 0.0}, "no KL to the first policy"
    if model.lora is None and model.train_lm_head:
        yield {"model.train_lm_head": False}, "the head stays as it is"
    if "experts" not in predictor.shape.parameters:
        adapters: dict[str, Any] = {"model.lora": {"r": LoraConfig().r}} if model.lora is None else {}
        if adapters:
            yield adapters, "adapters train, not the weights"
        if not predictor.quantized and find_spec("bitsandbytes"):
            yield adapters | {"model.quantization": "nf4"}, "weights of 4 bits under the adapters"
    if config.micro_batch_tokens != "auto" and config.micro_batch_tokens > 1:
        yield {"micro_batch_tokens": config.micro_batch_tokens // 2}, "more and smaller forwards"
    if config.prompts_per_step > (fewest := max(config.minibatches, predictor.device.ranks)):
        half = max(fewest, config.prompts_per_step // 2)
        yield {"prompts_per_step": half}, "fewer prompts in a step"
