"""Right answers against plausible wrong ones: preference data from any task with whole numbers as answers."""

from __future__ import annotations

import random

from grpo_fast.data.types import Prompt
from grpo_fast.preference.config import AnswersConfig
from grpo_fast.preference.ranked import RankedGroup, RankedResponse


def answer_group(prompt: Prompt, config: AnswersConfig, seed: int) -> RankedGroup:
    """The right answer and `config.wrong` wrong ones, graded by nearness; the same for the same seed.

    Raises:
        ValueError: the row has no such column, or its value is no whole number.
    """
    if config.column not in prompt.columns:
        raise ValueError(
            f"preference.answers.column = {config.column!r} is no column of row {prompt.index}; there are "
            f"{', '.join(sorted(prompt.columns))}"
        )
    text = str(prompt.columns[config.column]).strip()
    try:
        right = int(text)
    except ValueError:
        raise ValueError(
            f"row {prompt.index}: {config.column} = {text!r} is no whole number, from which "
            "preference.answers makes wrong ones; give pairs or groups in the data instead"
        ) from None
    wrong = plausible_errors(right, config.wrong, random.Random(f"{seed}/{prompt.index}/{right}"))
    return RankedGroup(
        prompt.prompt,
        tuple(
            RankedResponse(config.template.format(answer=value), -float(abs(value - right)))
            for value in [right, *wrong]
        ),
    )


def plausible_errors(right: int, n: int, rng: random.Random) -> list[int]:
    """`n` different numbers that careless arithmetic gives for `right`.

    Slips by one or two, a lost or extra carry, swapped digits, a turned sign.
    """
    slips = {right + step for step in (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)}
    digits = str(abs(right))
    if len(digits) > 1:
        slips.add((-1 if right < 0 else 1) * int(digits[:-2] + digits[-1] + digits[-2]))
    slips.add(-right)
    slips.discard(right)
    if n > len(slips):
        raise ValueError(
            f"preference.answers.wrong = {n} exceeds the {len(slips)} plausible errors for {right}"
        )
    return rng.sample(sorted(slips), n)
