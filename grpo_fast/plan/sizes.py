"""The sizes of a training step and of the largest micro-batch that it is packed into."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_fast.config.schema import TrainConfig
from grpo_fast.policy.packing import balance

# Bytes of a packed batch: token, position and segment of every input; of every target its index, id, sequence
# and group, its advantage, sampler's, old and reference log-probability.
BYTES_PER_INPUT, BYTES_PER_TARGET = 3 * 8, 4 * 8 + 4 * 4

MOST_PACKED = 128  # documents that are laid out to see how large a step's micro-batches become

MOST_IN_FLIGHT = 1024  # what vLLM runs at once on a large GPU: its decoding gains little beyond


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a rank's part of one training step, each at its largest."""

    prompts: int  # prompts_per_step / ranks
    generations: int  # completions of each
    prompt_length: int  # tokens
    completion_length: int
    micro_batch_tokens: int
    minibatches: int = 1
    most_in_flight: int = MOST_IN_FLIGHT  # completions that vLLM decodes at once, at most
    shares_prompts: bool = True  # false: each completion computes its own
    longest: int = 0  # tokens of a sequence that vLLM must hold, where evaluation has a longer one

    @property
    def in_flight(self) -> int:
        """Completions that vLLM decodes at once."""
        return min(self.most_in_flight, self.completions)

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


def step_sizes(config: TrainConfig, ranks: int = 1) -> StepSizes:
    """The sizes of a run's steps; a group of two and one completion a micro-batch where they are `auto`.

    Args:
        config: `max_prompt_length` of its data, and of evaluation's, is how long prompts are.
        ranks: which share the prompts; the sizes are those of the rank with the most.

    Raises:
        ValueError: nothing says how long prompts may be, or the algorithm has no rollouts.
    """
    if config.algorithm != "grpo":
        raise ValueError(f"algorithm = {config.algorithm!r} has no rollouts; only grpo can be planned")
    prompt = config.dataset.max_prompt_length
    if prompt is None:
        raise ValueError(
            "the longest prompt is not known: set dataset.max_prompt_length (or --prompt-length of "
            "`grpo-fast plan`)"
        )
    generations, tokens, vllm = config.rollout.num_generations, config.micro_batch_tokens, config.rollout.vllm
    completion = config.rollout.max_completion_length
    question = getattr(config.evaluation.dataset, "max_prompt_length", None) or 0
    return StepSizes(
        prompts=-(-config.prompts_per_step // ranks),
        generations=2 if generations == "auto" else generations,
        prompt_length=prompt,
        completion_length=completion,
        micro_batch_tokens=prompt + completion if tokens == "auto" else tokens,
        minibatches=config.minibatches,
        most_in_flight=vllm.max_sequences or MOST_IN_FLIGHT,
        longest=vllm.max_model_length or question + completion,
    )


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of an optimiser step, in the sizes that bytes and seconds follow from."""

    inputs: int
    pairs: int  # of tokens that see each other
    targets: int
    count: float  # micro-batches of an optimiser step
    documents: int
    joined: int  # completions that come after another with their prompt
    prompt: int  # tokens of each prompt
    sequence: int  # and with a completion's inputs
    groups: float  # that it holds

    @property
    def masked(self) -> int:
        """Elements of SDPA's masks: each joined completion's inputs against its prompt and themselves.

        Short ones share a call, whose mask holds at most `PAIRS_A_CALL` more for each.
        """
        return self.joined * (self.sequence - self.prompt) * self.sequence


def largest_micro_batch(sizes: StepSizes) -> MicroBatch:
    """The first that `pack` makes, all completions as long as they may be.

    Of a step with very many documents, that of a part of its groups: the number of micro-batches grows with
    them, and their size hardly changes.
    """
    of_group = _documents_of_a_group(sizes)
    groups = min(sizes.groups, max(1, MOST_PACKED // len(of_group)))
    documents = of_group[-MOST_PACKED:] * groups
    batches = balance([inputs for inputs, _ in documents], sizes.micro_batch_tokens)
    count = -(-len(batches) * sizes.groups * len(of_group) // len(documents))
    return _micro_batch([documents[i] for i in batches[0]], sizes, count)


def whole_step(sizes: StepSizes, count: float = 1) -> MicroBatch:
    """Every document of a step, as if it were one micro-batch, but for their `count`."""
    return _micro_batch(_documents_of_a_group(sizes) * sizes.prompts, sizes, count)


def _documents_of_a_group(sizes: StepSizes) -> list[tuple[int, int]]:
    """(inputs, targets) of those that `pack` makes of one group."""
    completion = sizes.completion_length - 1  # the last token is a target only
    length, held = sizes.prompt_length + completion, 1
    most = sizes.generations if sizes.shares_prompts else 1
    while held < most and length + completion <= sizes.micro_batch_tokens:
        held, length = held + 1, length + completion
    full, rest = divmod(sizes.generations, held)
    counts = [held] * full + ([rest] if rest else [])
    return [(sizes.prompt_length + n * completion, n * sizes.completion_length) for n in counts]


def _micro_batch(documents: Sequence[tuple[int, int]], sizes: StepSizes, count: float) -> MicroBatch:
    targets = sum(found for _, found in documents)
    prompt, sequence = sizes.prompt_length, sizes.sequence_length - 1
    joined = targets // sizes.completion_length - len(documents)
    # Every sequence's tokens see each other, but once within a prompt that is shared.
    pairs = (len(documents) + joined) * sequence * (sequence + 1) - joined * prompt * (prompt + 1)
    return MicroBatch(
        inputs=sum(inputs for inputs, _ in documents),
        pairs=pairs // 2,
        targets=targets,
        count=count,
        documents=len(documents),
        joined=joined,
        prompt=prompt,
        sequence=sequence,
        groups=targets / (sizes.generations * sizes.completion_length),
    )


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from `low` to `high` that fits, where none fits beyond one that does not."""
    if not fits(low):
        return None
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda number: not fits(number))
