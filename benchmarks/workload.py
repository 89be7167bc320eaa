"""What a step works on: sequences of real lengths, made of random tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_fast.objective import StepTotals
from grpo_fast.policy import Sample

LENGTHS = Path(__file__).with_name("lengths_gsm8k.json")


@dataclass(frozen=True)
class Lengths:
    """Tokens of a dataset's prompts and of their answers."""

    source: str
    prompts: tuple[int, ...]
    completions: tuple[int, ...]

    def draw(
        self, prompts: int, group: int, seed: int, *, longest: int | None = None
    ) -> list[tuple[int, int]]:
        """(prompt, completion) tokens of each sequence, group after group.

        Args:
            longest: completions are cut off there, as by a maximum length.
        """
        generator = random.Random(seed)
        drawn = []
        for _ in range(prompts):
            prompt = generator.choice(self.prompts)
            for _ in range(group):
                completion = generator.choice(self.completions)
                drawn.append((prompt, completion if longest is None else min(completion, longest)))
        return drawn


def load_lengths(path: Path = LENGTHS) -> Lengths:
    """
    Raises:
        ValueError: not JSON with `source`, `prompts` and `completions`, positive numbers of tokens.
    """
    try:
        found = json.loads(path.read_text())
        lengths = Lengths(found["source"], tuple(found["prompts"]), tuple(found["completions"]))
        numbers = (*lengths.prompts, *lengths.completions)
        if (
            not lengths.prompts
            or not lengths.completions
            or not all(isinstance(n, int) and n > 0 for n in numbers)
        ):
            raise ValueError("prompts and completions must be lists of positive whole numbers")
        return lengths
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--lengths {path} cannot be used ({error}); it takes JSON with source, prompts and completions"
        ) from error


def make_samples(
    lengths: Sequence[tuple[int, int]], group: int, vocabulary: int, seed: int
) -> tuple[list[Sample], StepTotals]:
    """Random tokens of the given lengths; a group shares its prompt, and half of it has a positive advantage.

    The two last tokens of the vocabulary, padding and end, are not drawn.
    """
    generator = random.Random(seed)
    samples: list[Sample] = []
    prompt: tuple[int, ...] = ()
    for index, (prompt_length, length) in enumerate(lengths):
        if index % group == 0:
            prompt = tuple(generator.choices(range(vocabulary - 2), k=prompt_length))
        samples.append(
            Sample(
                prompt_ids=prompt,
                completion_ids=tuple(generator.choices(range(vocabulary - 2), k=length)),
                advantage=1.0 if index % 2 == 0 else -1.0,
                group_id=index // group,
                sampler_logprobs=(0.0,) * length,
            )
        )
    return samples, StepTotals(num_tokens=sum(c for _, c in lengths), num_sequences=len(samples))
