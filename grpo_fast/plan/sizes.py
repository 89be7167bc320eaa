"""The sizes of a training step and of the largest micro-batch that it is packed into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_fast.config import TrainConfig

# Bytes of a packed batch: token, position and segment of every input; of every target its index, id, sequence
# and group, its advantage, sampler's, old and reference log-probability.
BYTES_PER_INPUT, BYTES_PER_TARGET = 3 * 8, 4 * 8 + 4 * 4


@dataclass(frozen=True)
class StepSizes:
    """The sizes of one training step, each at its largest."""

    prompts: int  # prompts_per_step
    generations: int  # completions of each
    prompt_length: int  # tokens
    completion_length: int
    micro_batch_tokens: int
    minibatches: int = 1

    @property
    def completions(self) -> int:
        return self.prompts * self.generations

    @property
    def sequence_length(self) -> int:
        return self.prompt_length + self.completion_length

    @property
    def groups(self) -> int:
        """Of one optimiser step."""
        return -(-self.prompts // self.minibatches)

    @property
    def packed_bytes(self) -> int:
        """Of all packed batches, which are on the device together; prompts count each time."""
        per_completion = BYTES_PER_INPUT * self.sequence_length + BYTES_PER_TARGET * self.completion_length
        return self.completions * per_completion


def step_sizes(config: TrainConfig, *, prompt_length: int | None = None) -> StepSizes:
    """The sizes of a run's steps; a group of two where `num_generations` is not known yet.

    Raises:
        ValueError: nothing says how long prompts may be, or the algorithm has no rollouts.
    """
    if config.algorithm != "grpo":
        raise ValueError(f"algorithm = {config.algorithm!r} has no rollouts; only grpo can be planned")
    prompt_length = prompt_length or config.dataset.max_prompt_length
    if prompt_length is None:
        raise ValueError(
            "the longest prompt is not known: set dataset.max_prompt_length (or --prompt-length of "
            "`grpo-fast plan`)"
        )
    generations = config.rollout.num_generations
    return StepSizes(
        prompts=config.prompts_per_step,
        generations=2 if generations == "auto" else generations,
        prompt_length=prompt_length,
        completion_length=config.rollout.length_limit,
        micro_batch_tokens=int(config.micro_batch_tokens),  # `auto` has become a number
        minibatches=config.minibatches,
    )


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of an optimiser step, in the sizes that bytes follow from."""

    inputs: int
    targets: int
    documents: int
    joined: int  # completions that come after another with their prompt
    prompt: int  # tokens of each prompt
    sequence: int  # and with a completion's inputs
    groups: float  # that it holds
    count: int  # micro-batches of an optimiser step

    @property
    def pairs(self) -> int:
        """Of tokens that see each other: of all sequences, but once within a prompt that is shared."""
        sequences = (self.documents + self.joined) * self.sequence * (self.sequence + 1)
        return (sequences - self.joined * self.prompt * (self.prompt + 1)) // 2

    @property
    def masked(self) -> int:
        """Elements of SDPA's masks: each joined completion's inputs against its prompt and themselves."""
        return self.joined * (self.sequence - self.prompt) * self.sequence


def largest_micro_batch(sizes: StepSizes) -> MicroBatch:
    """As even as `pack` makes them, all completions as long as they may be."""
    budget = sizes.micro_batch_tokens
    documents = sorted(_group(sizes, budget) * sizes.groups, reverse=True)
    fewest = -(-sum(inputs for inputs, _ in documents) // budget)
    for count in range(fewest, len(documents)):
        if sum(inputs for inputs, _ in documents[::count]) <= budget:
            return _micro_batch(documents[::count], sizes, count)
    return _micro_batch(documents[:1], sizes, len(documents))


def undivided_group(sizes: StepSizes) -> MicroBatch:
    """One group, whatever the budget for a micro-batch."""
    budget = sizes.generations * sizes.sequence_length
    return _micro_batch(_group(sizes, budget), sizes, sizes.groups)


def whole_step(sizes: StepSizes) -> MicroBatch:
    """Every document of a step, as if it were one micro-batch."""
    return _micro_batch(_group(sizes, sizes.micro_batch_tokens) * sizes.prompts, sizes, 1)


def _group(sizes: StepSizes, budget: int) -> list[tuple[int, int]]:
    """(inputs, targets) of the documents that `pack` makes of one group."""
    completion = sizes.completion_length - 1  # the last token is a target only
    length, held = sizes.prompt_length + completion, 1
    while held < sizes.generations and length + completion <= budget:
        held, length = held + 1, length + completion
    full, rest = divmod(sizes.generations, held)
    counts = [held] * full + ([rest] if rest else [])
    return [(sizes.prompt_length + n * completion, n * sizes.completion_length) for n in counts]


def _micro_batch(documents: Sequence[tuple[int, int]], sizes: StepSizes, count: int) -> MicroBatch:
    targets = sum(found for _, found in documents)
    return MicroBatch(
        inputs=sum(inputs for inputs, _ in documents),
        targets=targets,
        documents=len(documents),
        joined=targets // sizes.completion_length - len(documents),
        prompt=sizes.prompt_length,
        sequence=sizes.sequence_length - 1,
        groups=targets / (sizes.generations * sizes.completion_length),
        count=count,
    )


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from `low` to `high` that fits, where none fits beyond one that does not."""
    if not fits(low):
        return None
    step = low
    while low < high and fits(min(low + step, high)):
        low = min(low + step, high)
        step *= 2
    above = min(low + step, high + 1)
    while above - low > 1:
        middle = (low + above) // 2
        low, above = (middle, above) if fits(middle) else (low, middle)
    return low
