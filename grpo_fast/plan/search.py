"""The search for what fits: settings in a fixed order, the largest group, the longest completion."""

from __future__ import annotations

import math
import sys
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
from grpo_fast.plan.sizes import EXPECTED, StepSizes, largest, step_sizes
from grpo_fast.record.summary import bytes_text
from grpo_fast.rollout.vllm.settings import LORA_RANKS

Values = TypeVar("Values", bound=BaseModel)

MOST_GENERATIONS = 4096  # where the search for a group's size ends
MOST_CONTEXT = 1 << 24  # and for a completion's

AUTO_TOKENS = 65_536  # of an automatic micro-batch: a larger one is hardly faster
BUSY_TOKENS = 8_192  # of a micro-batch that keeps a GPU busy
BUSY_COMPLETIONS = 256  # in flight, that keep a GPU busy

SPARE = 0.03
"""Share of the device that a choice leaves, because bytes are estimates."""

RECOMPUTED = (False, "mlp", True, "offload")  # values of model.gradient_checkpointing, by what they cost
LEVEL, OFFLOAD, SYNC = "rollout.vllm.sleep_level", "memory.offload", "rollout.vllm.lora_sync"


@dataclass(frozen=True)
class Choice:
    """The settings of a run at its sizes, and the bytes that they take."""

    setup: Setup
    sizes: StepSizes

    @cached_property
    def parts(self) -> Parts:
        return step_bytes(self.setup, self.sizes)

    def total(self, phase: Phase) -> int:
        return sum(self.parts[phase].values())

    @cached_property
    def free(self) -> int:
        """Return the bytes left of the device or, where it lacks more, of the host; negative: no fit."""
        device = self.setup.device
        left = device.total - max(map(self.total, PHASES))
        on_host = device.host - host_bytes(self.setup, self.sizes)
        return left if on_host >= 0 else min(left, on_host)

    @property
    def busy(self) -> float:
        """Return how busy the GPU is kept, up to 1; 1 also where a step or the configuration has no more."""
        sizes, config = self.sizes, self.setup.config
        asked = {sizes.micro_batch_tokens} if sizes.micro_batch_tokens == config.micro_batch_tokens else set()
        whole = replace(sizes, micro_batch_tokens=sys.maxsize).micro_batch.inputs
        tokens = min(1.0, sizes.micro_batch_tokens / min(BUSY_TOKENS, whole, *asked))
        return tokens * min(1.0, sizes.in_flight / min(BUSY_COMPLETIONS, sizes.completions))

    @property
    def values(self) -> dict[str, Any]:
        """Return by dotted key what the planner decides where the configuration does not."""
        setup, sizes, config = self.setup, self.sizes, self.setup.config
        values: dict[str, Any] = {
            "micro_batch_tokens": sizes.micro_batch_tokens,
            "model.gradient_checkpointing": config.model.gradient_checkpointing,
            OFFLOAD: list(setup.offloaded),
        }
        if setup.engine.name == "vllm" and setup.on_gpu:
            values[LEVEL] = config.rollout.vllm.sleep_level
            if config.rollout.vllm.lora_sync != "auto":
                values[SYNC] = config.rollout.vllm.lora_sync
            values["rollout.vllm.max_sequences"] = sizes.in_flight
            if config.rollout.vllm.gpu_memory_utilization is None:
                cache = self.parts["rollout"]["KV cache"]
                values["rollout.vllm.kv_cache_gib"] = math.ceil(100 * cache / GIB) / 100
        if setup.device.ranks > 1:
            values["distributed.mode"] = config.distributed.mode
        return values


@dataclass(frozen=True)
class Search:
    """The search for one run on one device.

    Attributes:
        config: what it leaves to `auto` is searched, the rest stays.
    """

    config: TrainConfig
    shape: ModelShape
    device: DeviceBudget

    @cached_property
    def sizes(self) -> StepSizes:
        return step_sizes(self.config, self.device.ranks)

    @cached_property
    def _least(self) -> StepSizes:
        """One completion in flight, and one in a micro-batch."""
        return replace(self.sizes, micro_batch_tokens=self.sizes.sequence_length - 1, most_in_flight=1)

    @cached_property
    def setups(self) -> list[Setup]:
        """Return the settings to try, the preferred ones first.

        The order is: the least recomputation; LoRA merged, then as an adapter beside shared weights; an
        engine that stays on the GPU beside the trainer, then one that sleeps; the least offloaded.
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
                values = {
                    "model.gradient_checkpointing": recomputed,
                    SYNC: sync,
                    LEVEL: level,
                    OFFLOAD: parts,
                }
                setups.append(Setup(with_values(config, values), self.shape, device))
        return setups

    def _synced(self, plain: Setup) -> list[Setup]:
        """Return the setup with each way of LoRA to the engine that it leaves open."""
        lora, vllm = plain.config.model.lora, plain.config.rollout.vllm
        ways = [
            replace(plain, config=with_values(plain.config, {SYNC: way})) for way in ("merged", "adapter")
        ]
        is_open = lora is not None and vllm.lora_sync == "auto" and plain.engine.name == "vllm"
        takes = lora is not None and lora.r <= LORA_RANKS[-1] and vllm.sleep_level != 2
        # An adapter that leaves the engine a copy of the weights saves nothing; 4-bit ones have one as it is.
        saves = ways[1].weights.shared and not plain.weights.shared
        return ways if is_open and takes and saves else [plain]

    def choose(self) -> Choice | None:
        """Return the first settings that fit and keep the GPU busy, else those that keep it busiest.

        `SPARE` is left where that is possible. None: nothing fits.
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
        """Yield each of `setups` with the most completions in flight, the largest micro-batch, and then the
        most room for completions that are longer than expected, that fit."""
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
        """Return the smallest step with the settings that take the least."""
        return max((Choice(setup, self._least) for setup in self.setups), key=lambda choice: choice.free)

    def largest_generations(self, most: int = MOST_GENERATIONS) -> int | None:
        """Return the most completions of a prompt that fit; None: not even two."""
        return self._most(self._least, "generations", 2, most)

    def longest_completion(self, generations: int) -> int | None:
        """Return the most tokens of a completion with which a group fits; None: not even one."""
        sizes = replace(self._least, generations=generations, micro_batch_tokens=1)
        return self._most(sizes, "completion_length", 1, MOST_CONTEXT)

    def _most(self, sizes: StepSizes, name: str, low: int, most: int) -> int | None:
        found = (_largest(setup, sizes, name, low, most) for setup in reversed(self.setups))
        return max(filter(None, found), default=None)


def _largest(setup: Setup, sizes: StepSizes, name: str, low: int, most: int, spare: int = 0) -> int | None:
    """Return the largest value of one of the sizes with which `spare` bytes are left."""
    return largest(low, most, lambda value: Choice(setup, replace(sizes, **{name: value})).free >= spare)  # type: ignore[arg-type]


def too_large(search: Search) -> str:
    """Return the sentence for a run that does not fit: the missing bytes, and what makes room."""
    least, config, device = search.least(), search.config, search.device
    both = f" with reference.path = {config.reference.path!r}" if search.shape.reference else ""
    return (
        f"{config.model.path}{both} does not fit {device.name}: {least.sizes.prompts} prompts with "
        f"{least.sizes.generations} completions need {bytes_text(-least.free)} more than its "
        f"{bytes_text(device.total)}. What makes room, in this order: {', '.join(levers(search))}"
    )


def levers(search: Search) -> list[str]:
    """Return what a run that does not fit can change, what alters the training least first."""
    config, setup = search.config, search.least().setup
    model, vllm, lora = config.model, config.rollout.vllm, config.model.lora is not None
    dense, trained, half = not search.shape.experts, search.shape.head_trained, config.prompts_per_step // 2
    offers = {
        "rollout.vllm.sleep_level=auto": vllm.sleep_level == 0 and setup.engine.name == "vllm",
        "memory.offload=auto": setup.on_gpu and setup.offloaded != setup.offloadable,
        "model.gradient_checkpointing=auto": model.gradient_checkpointing in (False, "mlp", True),
        "rollout.vllm.lora_sync=adapter": setup.engine.name == "vllm" and lora and not setup.weights.shared,
        "optimizer.kind=adamw_8bit": config.optimizer.kind == "adamw" and not lora,
        "optimizer.stochastic_rounding=true": model.dtype != "float32"
        and not (lora or config.optimizer.stochastic_rounding),
        "model.dtype=bfloat16": model.dtype == "float32",
        "reference.quantization=nf4": search.shape.reference and config.reference.quantization is None,
        "loss.beta=0": config.loss.beta and (search.shape.reference or not lora),
        "model.train_lm_head=false": trained and not lora,
        "model.lora={}": not lora,
        "model.quantization=nf4": dense and not search.shape.quantized,
        f"prompts_per_step={half}": half >= max(config.minibatches, search.device.ranks),
    }
    return [*(change for change, offered in offers.items() if offered), "shorter completions", "a larger GPU"]


def modes(config: TrainConfig, ranks: int, *, whole: bool) -> list[TrainConfig]:
    """Return the run with each `distributed.mode` that it leaves open, the preferred one first.

    Args:
        whole: weights cannot be sharded: on a CPU, and in 4 bits.

    Raises:
        ValueError: a step has fewer prompts than there are ranks, or mode shard is asked for with a part that
            it does not offload.
    """
    if ranks == 1:
        return [config]
    for stage in resolve_stages(config):
        if (prompts := stage.config.prompts_per_step) < ranks:
            of = f"stage {stage.name!r}: " if config.stages else ""
            raise ValueError(
                f"{of}prompts_per_step = {prompts} is less than the {ranks} ranks, each of which answers "
                f"prompts of its own; raise it to {ranks} or more, or start fewer ranks"
            )
    mode, keeps = config.distributed.mode, "reference" in config.memory.offload
    if keeps and mode == "shard":
        raise ValueError(
            f"memory.offload = {config.memory.offload}: distributed.mode = 'shard' keeps the reference in "
            "rows on every rank; leave it out, or set distributed.mode to replicate"
        )
    open_modes = [mode]
    if mode == "auto":
        open_modes = (
            ["replicate"] if keeps or whole or config.reference.prompt_template else ["replicate", "shard"]
        )
    return [with_values(config, {"distributed.mode": mode}) for mode in open_modes]


def flow(value: Any) -> str:
    """Write a value as YAML in one line."""
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]


def written(values: Mapping[str, Any]) -> str:
    """Write values by key as on the command line."""
    return " ".join(f"{key}={flow(value)}" for key, value in values.items())


def with_values(section: Values, values: Mapping[str, Any]) -> Values:
    """Return a configuration, or a section of it, with other values of some dotted keys, unchecked."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        changed = with_values(getattr(section, name), {rest: value}) if rest else value
        section = section.model_copy(update={name: changed})
    return section
