"""What to choose: the fastest of the settings that fit, the largest group, the longest completion."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml

from grpo_fast.config.schema import TrainConfig, at
from grpo_fast.config.stages import resolve_stages
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.model_shape import Shapes
from grpo_fast.plan.prediction import PHASES, STAYS_SHARDED, Prediction, Predictor
from grpo_fast.plan.sizes import MOST_IN_FLIGHT, StepSizes, step_sizes
from grpo_fast.policy.architecture import positions
from grpo_fast.policy.load import require_replay
from grpo_fast.policy.quantization import quantizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

T = TypeVar("T")

MOST_GENERATIONS = 4096  # where the search for a group's size ends
MOST_CONTEXT = 1 << 24  # and for a completion's

AUTO_MOST = 64
"""Completions of a prompt that `auto` goes up to: DeepSeekMath's group (arXiv:2402.03300, section 4.2). More
cost time in proportion, and are given as a number."""

AUTO_TOKENS = 65_536
"""Tokens that an automatic micro-batch goes up to: a larger one is hardly faster, and fails more dearly."""

SPARE = 0.03
"""Of the device, that a choice leaves: bytes are predictions, and a few more in flight gain little."""

CONSTANTS = {
    "micro_batch_tokens": 16_384,
    "model.gradient_checkpointing": False,
    "rollout.num_generations": 8,
}
"""What `auto` is on a CPU, without planning; for `memory.offload` the engines need no room there."""

MEMORY_KEYS = ("model.gradient_checkpointing", "rollout.vllm.sleep_level", "memory.offload")
OF_ANY_TRAINING = ("micro_batch_tokens", "model.gradient_checkpointing")
RECOMPUTED = (False, "mlp", True, "offload")  # by what it costs


@dataclass(frozen=True)
class Plan:
    """The choice for a run, and what else would fit."""

    config: TrainConfig  # as it was asked for
    search: Search  # that found it
    choice: Prediction  # where nothing fits, what is least too large
    largest: Prediction | None  # with the largest group that fits; None: not even two completions do
    rivals: tuple[Prediction, ...] = ()  # of other ways to divide the run over ranks: the best of each mode

    @property
    def largest_generations(self) -> int | None:
        """Completions of a prompt; None: not even two fit."""
        return None if self.largest is None else self.largest.sizes.generations

    @property
    def by_hand(self) -> list[str]:
        """Keys of `choice.values` that the configuration sets itself."""
        return [key for key in self.choice.values if at(self.config, key) not in ("auto", None)]


@dataclass(frozen=True)
class Context:
    """The longest sequences of which a group fits."""

    tokens: int  # of a prompt and its completion
    bound: str  # what a longer completion exceeds
    positions: int | None  # that the model was made for; None: no limit


@dataclass(frozen=True)
class Search:
    """What fits of one run on one device. Methods raise ValueError for a model that cannot be planned."""

    config: TrainConfig  # what it leaves to `auto` is tried, the rest is as it is
    shapes: Shapes
    device: DeviceBudget

    @cached_property
    def sizes(self) -> StepSizes:
        """As the configuration has them."""
        return step_sizes(self.config, self.device.ranks)

    def fastest(self, generations: int) -> Prediction | None:
        """Of what fits, with `SPARE` left where that is possible, what is predicted to be the fastest.

        Where a micro-batch fills the device without recomputation, nothing is gained by any. None: nothing
        fits.
        """
        found: list[Prediction] = []
        sizes = replace(self._least, generations=generations, most_in_flight=self.sizes.most_in_flight)
        for spare in (int(SPARE * self.device.total), 0):
            for ways in self._candidates():
                found += [choice for way in ways if (choice := self._fitted(way, sizes, spare))]
                if any(choice.is_busy for choice in found):
                    break
            if found:
                break
        return min(found, key=lambda choice: sum(choice.seconds.values()), default=None)

    def least(self) -> Prediction:
        """The smallest step in the way that takes the least."""
        choices = [least_memory.predict(self._least) for *_, least_memory in self._candidates()]
        return max(choices, key=lambda choice: choice.free)

    def generations(self) -> int | None:
        """The size of a group: as configured, or what fits within what is usual and one wave of a rollout."""
        asked = self.config.rollout.num_generations
        if asked != "auto":
            return asked
        one_wave = MOST_IN_FLIGHT // self.config.prompts_per_step  # of one rank: more of them change no group
        return self.largest_generations(min(AUTO_MOST, max(8, one_wave)))

    def largest_generations(self, most: int = MOST_GENERATIONS, *, at_once: bool = False) -> int | None:
        """Completions of a prompt, up to `most`, that fit with the least in flight; None: not even two.

        Args:
            at_once: a step's in one micro-batch, instead of one in each.
        """
        found: list[int] = []
        sizes = replace(self._least, micro_batch_tokens=sys.maxsize) if at_once else self._least
        for *_, least_memory in self._candidates():
            found += filter(None, [least_memory.largest_fitting(sizes, "generations", 2, most)])
            if most in found:
                break
        return max(found, default=None)

    def largest_context(self, generations: int) -> Context | None:
        """The longest that fits with the least at once; None: not even one token of a completion."""
        # One completion in a micro-batch, however long.
        sizes = replace(self._least, generations=generations, micro_batch_tokens=1)
        found = [
            (way.largest_fitting(sizes, "completion_length", 1, MOST_CONTEXT) or 0, way)
            for *_, way in self._candidates()
        ]
        most, least_memory = max(found, key=lambda one: one[0])
        if not most:
            return None
        short, then = (
            least_memory.predict(replace(sizes, completion_length=length)) for length in (1, most + 1)
        )
        phase = max(PHASES, key=then.total)
        grown = Counter(then.parts[phase]) - Counter(short.parts[phase])
        part, _ = grown.most_common(1)[0]
        bound = f"{part} in the {phase}" if then.total(phase) > self.device.total else "the host's memory"
        limit = positions(self.shapes.config.get_text_config())
        return Context(sizes.prompt_length + most, bound, limit)

    @property
    def _least(self) -> StepSizes:
        """One completion in flight, and one in a micro-batch."""
        return replace(self.sizes, micro_batch_tokens=self.sizes.sequence_length, most_in_flight=1)

    def _candidates(self) -> Iterator[list[Predictor]]:
        """For each recomputation, the fastest first, every sleep level and offload, the least memory last."""
        config = self.config

        def way(recomputed: Any, level: Any, offload: Any) -> Predictor:
            changed = zip(MEMORY_KEYS, (recomputed, level, offload), strict=True)
            return Predictor(with_values(config, dict(changed)), self.shapes, self.device)

        asked, level, offload = (at(config, key) for key in MEMORY_KEYS)
        for recomputed in RECOMPUTED if asked == "auto" else [asked]:
            plain = way(recomputed, level, offload)
            if asked == "auto" and recomputed == "mlp" and not plain.shape.active_mlp:
                continue
            levels, lists = [level], [offload]
            if level == "auto" and plain.sleeps:
                levels = [0, 2 if plain.weights.sent else 1]
            if offload == "auto":
                lists = [list(plain.parts[:count]) for count in range(len(plain.parts) + 1)]
                lists = [parts for parts in lists if plain.on_host(parts) <= self.device.host_share]
            yield [way(recomputed, level, offload) for level in levels for offload in lists]

    def _fitted(self, predictor: Predictor, sizes: StepSizes, spare: int) -> Prediction | None:
        """With the most completions in flight, then the largest micro-batch, that fit."""
        asked = self.config.micro_batch_tokens
        in_flight = predictor.largest_fitting(sizes, "most_in_flight", 1, sizes.in_flight, spare)
        if in_flight is None:
            return None
        sizes = replace(sizes, most_in_flight=in_flight)
        most = AUTO_TOKENS if asked == "auto" else asked
        low = min(sizes.sequence_length, most)
        tokens = predictor.largest_fitting(sizes, "micro_batch_tokens", low, most, spare)
        choice = predictor.predict(replace(sizes, micro_batch_tokens=tokens or low))
        batch = choice.micro_batch
        if asked == "auto" and batch.count > 1:  # else shorter completions would fill one beyond what fits
            choice = predictor.predict(replace(sizes, micro_batch_tokens=batch.inputs))
        levels = [run.rollout.vllm.sleep_level for run in (self.config, predictor.run)]
        # What never sleeps leaves ample room, or it is put to sleep.
        return None if levels == ["auto", 0] and not choice.is_busy else choice


def plan(config: TrainConfig, shapes: Shapes, device: DeviceBudget) -> Plan:
    """What to choose for a run on a device; no weights are read.

    Raises:
        ValueError: the model cannot be packed or planned, or as `step_sizes`, `divisions` and
            `require_replay`.
    """
    if config.rollout.router_replay:
        require_replay(config.model, shapes.config)
    tried = with_constants(config) if device.kind == "cpu" else config
    best: dict[str, tuple[Prediction, Search]] = {}  # by mode
    for divided in divisions(tried, shapes.config, device):
        search = Search(divided, shapes, device)
        generations, mode = search.generations(), divided.distributed.mode
        found = (search.fastest(generations) if generations else None) or search.least()
        if mode not in best or found.cost < best[mode][0].cost:
            best[mode] = found, search
    (choice, search), *rivals = sorted(best.values(), key=lambda one: one[0].cost)
    most = search.largest_generations()
    largest = search.fastest(most) if most else None
    return Plan(config, search, choice, largest, tuple(rival for rival, _ in rivals))


def divisions(config: TrainConfig, model: PretrainedConfig, device: DeviceBudget) -> list[TrainConfig]:
    """The run with each mode that it leaves open; as it is on one rank.

    Raises:
        ValueError: a step has fewer prompts than there are ranks, or mode shard is asked for with what it
            cannot offload.
    """
    own, ranks = config.distributed, device.ranks
    if ranks == 1:
        return [config]
    for stage in resolve_stages(config):
        if (prompts := stage.config.prompts_per_step) < ranks:
            of = f"stage {stage.name!r}: " if config.stages else ""
            raise ValueError(
                f"{of}prompts_per_step = {prompts} is less than the {ranks} ranks, each of which answers "
                f"prompts of its own; raise it to {ranks} or more, or start fewer ranks"
            )
    stays = STAYS_SHARDED in config.memory.offload
    if stays and own.mode == "shard":
        raise ValueError(
            f"memory.offload = {config.memory.offload}: distributed.mode = 'shard' keeps the "
            f"{STAYS_SHARDED} in rows on every rank; leave it out, or set distributed.mode to replicate"
        )
    modes = [own.mode]
    if own.mode == "auto":
        whole = stays or device.kind == "cpu" or quantizes(config.model, model)
        modes = ["replicate"] if whole else ["replicate", "shard"]
    return [with_values(config, {"distributed.mode": mode}) for mode in modes]


def flow(value: Any) -> str:
    """As YAML in one line, for a command's."""
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]


def written(values: Mapping[str, Any]) -> str:
    """As on the command line."""
    return " ".join(f"{key}={flow(value)}" for key, value in values.items())


def with_constants(config: TrainConfig) -> TrainConfig:
    """As a CPU, or training without rollouts, runs what is left to `auto`."""
    read = CONSTANTS if config.algorithm == "grpo" else {key: CONSTANTS[key] for key in OF_ANY_TRAINING}
    return with_values(config, {key: value for key, value in read.items() if at(config, key) == "auto"})


def with_values(section: T, values: Mapping[str, Any]) -> T:
    """The configuration, or a section of it, with other values of some dotted keys.

    Raises:
        ValueError: values that one section cannot have together.
    """
    inner: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in values.items():
        name, _, rest = key.partition(".")
        inner[name][rest] = value
    changed = {
        name: own[""] if "" in own else with_values(getattr(section, name), own)
        for name, own in inner.items()
    }
    given: Any = section
    if isinstance(section, TrainConfig):  # whose own checks would ask for more than a plan has
        return cast(T, section.model_copy(update=changed))
    if is_dataclass(section):
        return cast(T, replace(given, **changed))
    return cast(T, type(given).model_validate(dict(given) | changed))
