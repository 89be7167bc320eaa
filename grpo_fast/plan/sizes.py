"""The sizes of a training step and of its largest micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_fast.config.schema import TrainConfig

MOST_IN_FLIGHT = 1024  # completions that vLLM decodes at once; more gain little on a large GPU
EXPECTED = 50  # minimum of `StepSizes.expected`; vLLM preempts and recomputes some longer completions


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of an optimizer step."""

    inputs: int  # tokens
    completions: int
    targets: int  # tokens
    repeated: int  # tokens of prompts, with their keys repeated for each completion


@dataclass(frozen=True)
class StepSizes:
    """The sizes of one rank's part of a training step, with completions of maximum length."""

    prompts: int  # prompts_per_step / ranks
    generations: int  # completions per prompt
    prompt_length: int  # tokens
    completion_length: int
    micro_batch_tokens: int
    minibatches: int = 1
    most_in_flight: int = MOST_IN_FLIGHT  # completions that vLLM decodes at once
    shares_prompts: bool = True  # False: each completion computes its prompt
    longest: int = 0  # tokens of the longest sequence of evaluation
    expected: int = EXPECTED  # % of the completion length that the KV cache is sized for

    @property
    def in_flight(self) -> int:
        """Return the completions that vLLM decodes at once."""
        return min(self.most_in_flight, self.completions)

    @property
    def completions(self) -> int:
        return self.prompts * self.generations

    @property
    def sequence_length(self) -> int:
        return self.prompt_length + self.completion_length

    @property
    def groups(self) -> int:
        """Return the prompts of one optimizer step."""
        return -(-self.prompts // self.minibatches)

    @property
    def micro_batch(self) -> MicroBatch:
        """Return an upper bound of the micro-batches that `pack` makes.

        A document is a prompt with as many of its completions as fit. The last token of a completion is not
        an input. A completion is never split.
        """
        prompt, inputs = self.prompt_length, self.completion_length - 1
        budget = max(self.micro_batch_tokens, prompt + inputs)
        together = (budget - prompt) // inputs if inputs else self.generations
        together *= self.shares_prompts
        together = max(1, min(self.generations, together))  # completions of one document
        documents, of_step = -(-self.generations // together), self.groups * self.generations
        budget = min(budget, self.groups * documents * prompt + of_step * inputs)
        completions = min(of_step, budget * together // (inputs * together + prompt))
        return MicroBatch(budget, completions, completions * self.completion_length, completions * prompt)

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of all packed batches of a step.

        An input has a token, a position and a segment. A target has an index, id, sequence and group, an
        advantage and three log-probabilities.
        """
        return self.completions * (3 * 8 * self.sequence_length + (4 * 8 + 4 * 4) * self.completion_length)


def step_sizes(config: TrainConfig, ranks: int = 1) -> StepSizes:
    """Return the sizes of a step of the rank with the most prompts; an `auto` micro-batch has one completion.

    Raises:
        ValueError: `dataset.max_prompt_length` is not set, or the algorithm has no rollouts.
    """
    if config.algorithm != "grpo":
        raise ValueError(f"algorithm = {config.algorithm!r} has no rollouts; only grpo can be planned")
    prompt = config.dataset.max_prompt_length
    if prompt is None:
        raise ValueError(
            "the longest prompt is not known: set dataset.max_prompt_length (or --prompt-length of "
            "`grpo-fast plan`)"
        )
    tokens, vllm = config.micro_batch_tokens, config.rollout.vllm
    completion = config.rollout.max_completion_length
    question = getattr(config.evaluation.dataset, "max_prompt_length", None) or 0
    return StepSizes(
        prompts=math.ceil(config.prompts_per_step / ranks),
        generations=config.rollout.num_generations,
        prompt_length=prompt,
        completion_length=completion,
        micro_batch_tokens=prompt + completion if tokens == "auto" else tokens,
        minibatches=config.minibatches,
        most_in_flight=vllm.max_sequences or MOST_IN_FLIGHT,
        longest=vllm.max_model_length or question + completion,
    )
