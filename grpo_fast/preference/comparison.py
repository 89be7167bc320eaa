"""A prompt with completions of known worth: a pair, a labelled completion or a ranked group."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_fast.data.types import Prompt


@dataclass(frozen=True)
class Comparison:
    """n completions of one prompt: a pair (the chosen first), one with a label, or a ranked group."""

    prompt: Prompt
    completion_ids: tuple[tuple[int, ...], ...]  # n, the end token included
    grades: tuple[float, ...]  # n: higher is better, equal is a tie
    margin: float = 0.0  # what the better one's reward must be ahead by
    weight: float = 1.0  # factor of its loss
    group_type: str | None = None
    behaviour_logprobs: tuple[float | None, ...] | None = None  # n, of the policy that wrote them, summed
    mismatched_ids: tuple[int, ...] | None = None  # a completion of another prompt, for KTO's reference point

    @property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """Every completion that the reference model must score."""
        return self.completion_ids + ((self.mismatched_ids,) if self.mismatched_ids else ())
