"""The search for settings that fit a device, and for the largest group."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from grpo_fast.config.schema import TrainConfig, at
from grpo_fast.config.stages import resolve_stages
from grpo_fast.plan.devices import GIB, DeviceBudget
from grpo_fast.plan.memory import PHASES, Parts, Phase, Setup, host_bytes, parts_bytes, step_bytes
from grpo_fast.plan.model_shape import ModelShape
from grpo_fast.plan.sizes import EXPECTED, StepSizes, step_sizes
from grpo_fast.record.summary import bytes_text
from grpo_fast.rollout.vllm.settings import LORA_RANKS

Values = TypeVar("Values", bound=BaseModel)

MOST_GENERATIONS = 4096  # of the search for the largest group
AUTO_TOKENS = 65_536  # of an automatic micro-batch, at most
BUSY_TOKENS = 8_192  # of a micro-batch that keeps a GPU busy
BUSY_COMPLETIONS = 256  # in flight that keep a GPU busy
SPARE = 0.03  # share of the device that a choice leaves free, as bytes are estimates
RECOMPUTED = (False, "mlp", True, "offload")  # values of model.gradient_checkpointing by cost
LEVEL, OFFLOAD, SYNC = "rollout.vllm.sleep_level", "memory.offload", "rollout.vllm.lora_sync"
RECOMPUTE = "model.gradient_checkpointing"


@dataclass(frozen=True)
class Choice:
    """The settings and sizes of a run, and their bytes."""

    setup: Setup
    sizes: StepSizes

    @cached_property
    def parts(self) -> Parts:
        return step_bytes(self.setup, self.sizes)

    def total(self, phase: Phase) -> int:
        return sum(self.parts[phase].values())

    @cached_property
    def free(self) -> int:
        """Return the bytes left on the device or, if they are missing, on the host; negative: no fit."""
        device = self.setup.device
        left = device.total - max(map(self.total, PHASES))
        on_host = device.host - host_bytes(self.setup, self.sizes)
        return left if on_host >= 0 else min(left, on_host)

    @property
    def busy(self) -> float:
        """Return how busy the GPU is, up to 1; also 1 if the step or the configuration allows no more."""
        sizes, config = self.sizes, self.setup.config
        asked = {sizes.micro_batch_tokens} if sizes.micro_batch_tokens == config.micro_batch_tokens else set()
        whole = replace(sizes, micro_batch_tokens=sys.maxsize).micro_batch.inputs
        tokens = min(1.0, sizes.micro_batch_tokens / min(BUSY_TOKENS, whole, *asked))
        return tokens * min(1.0, sizes.in_flight / min(BUSY_COMPLETIONS, sizes.completions))

    @property
    def values(self) -> dict[str, Any]:
        """Return the planner's values by dotted key."""
        setup, sizes, config = self.setup, self.sizes, self.setup.config
        values: dict[str, Any] = {
            "micro_batch_tokens": sizes.micro_batch_tokens,
            RECOMPUTE: config.model.gradient_checkpointing,
            OFFLOAD: list(setup.offloaded),
        }
        if setup.engine.name == "vllm" and setup.on_gpu:
            vllm = config.rollout.vllm
            values |= {LEVEL: vllm.sleep_level, "rollout.vllm.max_sequences": sizes.in_flight}
            if vllm.lora_sync != "auto":
                values[SYNC] = vllm.lora_sync
            if vllm.gpu_memory_utilization is None:
                cache = self.parts["rollout"]["KV cache"]
                values["rollout.vllm.kv_cache_gib"] = math.ceil(100 * cache / GIB) / 100
        if setup.device.ranks > 1:
            values["distributed.mode"] = config.distributed.mode
        return values


@dataclass(frozen=True)
class Search:
    """The search for the values of one run on one device that `config` leaves to `auto`."""

    config: TrainConfig
    shape: ModelShape
    device: DeviceBudget

    @cached_property
    def sizes(self) -> StepSizes:
        return step_sizes(self.config, self.device.ranks)

    @cached_property
    def _least(self) -> StepSizes:
        return replace(self.sizes, micro_batch_tokens=self.sizes.sequence_length - 1, most_in_flight=1)

    @cached_property
    def setups(self) -> list[Setup]:
        """Return the settings to try, by preference.

        The order is: the least recomputation; LoRA merged, then as an adapter on shared weights; an engine
        that never sleeps, then one that does; the least offload.
        """
        config, device, setups = self.config, self.device, []
        asked, level, offload = config.model.gradient_checkpointing, at(config, LEVEL), config.memory.offload
        plain = Setup(config, self.shape, device)
        lists: list[Any] = [offload]
        if offload == "auto":
            lists = [list(plain.offloadable[:count]) for count in range(len(plain.offloadable) + 1)]
            lists = [parts for parts in lists if parts_bytes(plain, parts) <= device.host]
        ways: list[tuple[Any, Any, Any]] = []
        for synced in self._synced(plain):
            sync = synced.config.rollout.vllm.lora_sync
            if level == "auto" and plain.sleeps:
                sleeping = 2 if synced.weights.sent else 1
                ways += [(sync, 0, lists[0]), *((sync, sleeping, parts) for parts in lists)]
            else:
                ways += [(sync, level, parts) for parts in lists]
        for recomputed in RECOMPUTED if asked == "auto" else [asked]:
            for sync, level, parts in ways:
                values = {RECOMPUTE: recomputed, SYNC: sync, LEVEL: level, OFFLOAD: parts}
                setups.append(Setup(with_values(config, values), self.shape, device))
        return setups

    def _synced(self, plain: Setup) -> list[Setup]:
        lora, vllm = self.config.model.lora, self.config.rollout.vllm
        if lora is None or vllm.lora_sync != "auto" or plain.engine.name != "vllm":
            return [plain]
        merged, adapter = (
            replace(plain, config=with_values(self.config, {SYNC: way})) for way in ("merged", "adapter")
        )
        allowed = lora.r <= LORA_RANKS[-1] and vllm.sleep_level != 2
        # An adapter saves memory only where it makes vLLM share the base.
        saves = adapter.weights.shared and not plain.weights.shared
        return [merged, adapter] if allowed and saves else [plain]

    def choose(self) -> Choice | None:
        """Return the first settings that fit and keep the GPU busy, else the busiest, else None.

        `SPARE` stays free if possible.
        """
        sizes = replace(self._least, most_in_flight=self.sizes.most_in_flight)
        for spare in (int(SPARE * self.device.total), 0):
            found: list[Choice] = []
            for choice in self._fitting(sizes, spare):
                if choice.busy == 1:
                    return choice
                found.append(choice)
            if found:
                return max(found, key=lambda choice: choice.busy)
        return None

    def _fitting(self, sizes: StepSizes, spare: int) -> Iterator[Choice]:
        """Yield each of `setups` that fits, with its largest sizes.

        The order is: completions in flight, the micro-batch, the expected length of completions.
        """
        asked = self.config.micro_batch_tokens
        most = AUTO_TOKENS if asked == "auto" else asked
        for setup in self.setups:
            in_flight = _largest(setup, sizes, "most_in_flight", 1, sizes.in_flight, spare)
            if in_flight is not None:
                held, low = replace(sizes, most_in_flight=in_flight), min(sizes.sequence_length, most)
                tokens = _largest(setup, held, "micro_batch_tokens", low, most, spare)
                held = replace(held, micro_batch_tokens=tokens or low)
                expected = _largest(setup, held, "expected", EXPECTED, 100, spare)
                yield Choice(setup, replace(held, expected=expected or EXPECTED))

    def least(self) -> Choice:
        """Return the smallest step with the settings that need the least memory."""
        return max((Choice(setup, self._least) for setup in self.setups), key=lambda choice: choice.free)

    def largest_generations(self) -> int | None:
        """Return the largest group that fits, up to `MOST_GENERATIONS`; None: not even two completions."""
        setups = reversed(self.setups)
        found = (_largest(setup, self._least, "generations", 2, MOST_GENERATIONS) for setup in setups)
        return max(filter(None, found), default=None)


def _largest(setup: Setup, sizes: StepSizes, name: str, low: int, most: int, spare: int = 0) -> int | None:
    """Return the largest value of a size that leaves `spare` bytes, by bisection, or None."""

    def exceeds(value: int) -> bool:
        return Choice(setup, replace(sizes, **{name: value})).free < spare  # type: ignore[arg-type]

    if exceeds(low):
        return None
    return low + bisect_left(range(low + 1, most + 1), True, key=exceeds)


def too_large(search: Search) -> str:
    """Return the error for a run that does not fit: the missing bytes, and what makes room."""
    least, config, device = search.least(), search.config, search.device
    both = f" with reference.path = {config.reference.path!r}" if search.shape.reference else ""
    return (
        f"{config.model.path}{both} does not fit {device.name}: {least.sizes.prompts} prompts with "
        f"{least.sizes.generations} completions need {bytes_text(-least.free)} more than its "
        f"{bytes_text(device.total)}. To make room, try in this order: {', '.join(levers(search))}"
    )


def levers(search: Search) -> list[str]:
    """Return changes that make room, those that alter the training least first."""
    config, setup, shape = search.config, search.least().setup, search.shape
    model, vllm, rounded = config.model, config.rollout.vllm, config.optimizer.stochastic_rounding
    on_vllm, full, half = setup.engine.name == "vllm", model.lora is None, config.prompts_per_step // 2
    offers = {
        "rollout.vllm.sleep_level=auto": vllm.sleep_level == 0 and on_vllm,
        "memory.offload=auto": setup.on_gpu and setup.offloaded != setup.offloadable,
        "model.gradient_checkpointing=auto": model.gradient_checkpointing in (False, "mlp", True),
        "rollout.vllm.lora_sync=adapter": on_vllm and not full and not setup.weights.shared,
        "optimizer.kind=adamw_8bit": config.optimizer.kind == "adamw" and full,
        "optimizer.stochastic_rounding=true": full and shape.itemsize < 4 and not rounded,
        "model.dtype=bfloat16": shape.itemsize == 4,
        "reference.quantization=nf4": shape.reference and config.reference.quantization is None,
        "loss.beta=0": config.loss.beta and (shape.reference or full),
        "model.train_lm_head=false": shape.head_trained and full,
        "model.lora={}": full,
        "model.quantization=nf4": not shape.experts and not shape.quantized,
        f"prompts_per_step={half}": half >= max(config.minibatches, search.device.ranks),
    }
    return [*(change for change, offered in offers.items() if offered), "shorter completions", "a larger GPU"]


def modes(config: TrainConfig, ranks: int, *, whole: bool) -> list[TrainConfig]:
    """Return the run with each open `distributed.mode`, by preference.

    Args:
        whole: weights cannot be sharded: on a CPU, and in 4 bits.

    Raises:
        ValueError: fewer prompts than ranks, or a part that mode shard cannot offload.
    """
    if ranks == 1:
        return [config]
    for stage in resolve_stages(config):
        if (prompts := stage.config.prompts_per_step) < ranks:
            of = f"stage {stage.name!r}: " if config.stages else ""
            raise ValueError(
                f"{of}prompts_per_step = {prompts} is less than the {ranks} ranks; raise it to {ranks} or "
                "more, or start fewer ranks"
            )
    mode, keeps = config.distributed.mode, "reference" in config.memory.offload
    if keeps and mode == "shard":
        raise ValueError(
            f"memory.offload = {config.memory.offload}: distributed.mode = 'shard' cannot offload the "
            "reference; leave it out, or set distributed.mode to replicate"
        )
    open_modes = [mode]
    if mode == "auto":
        shards = not (keeps or whole or config.reference.prompt_template)
        open_modes = ["replicate", "shard"] if shards else ["replicate"]
    return [with_values(config, {"distributed.mode": mode}) for mode in open_modes]


def flow(value: Any) -> str:
    """Format a value as YAML in one line."""
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]


def written(values: Mapping[str, Any]) -> str:
    """Format values by key as command-line arguments."""
    return " ".join(f"{key}={flow(value)}" for key, value in values.items())


def with_values(section: Values, values: Mapping[str, Any]) -> Values:
    """Return a configuration or section with other values by dotted key, without validation."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        changed = with_values(getattr(section, name), {rest: value}) if rest else value
        section = section.model_copy(update={name: changed})
    return section
