"""Keeps held-out questions out of the training set."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace

from grpo_fast.data.dataset import PromptDataset
from grpo_fast.data.tasks import PREFIX
from grpo_fast.data.types import Message, Prompt


def exclude_overlap(
    train: PromptDataset, held_out: PromptDataset, *, any_order: bool | None = None
) -> PromptDataset:
    """The training prompts that do not occur in the held-out set; `report.overlapping` counts the others.

    Questions are compared without regard to case, spacing and Unicode form. System prompts and the examples
    of the configurations do not take part.

    Args:
        any_order: also take questions as equal that hold the same words and symbols in another order, as
            `6 + 31` and `31 + 6`. Generated tasks are full of these; none: for reasoning-gym's.

    Raises:
        ValueError: nothing is left to train on.
    """
    if any_order is None:
        any_order = any(part.config.source.startswith(PREFIX) for part in (train, held_out))
    taken = {_key(prompt, held_out, any_order) for prompt in held_out}
    kept = tuple(prompt for prompt in train if _key(prompt, train, any_order) not in taken)
    if not kept:
        raise ValueError(
            f"all {len(train)} training prompts of {train.config.source} occur in the held-out set: "
            "give evaluation.dataset another split, or another seed some millions away"
        )
    overlapping = train.report.overlapping + len(train) - len(kept)
    return replace(train, prompts=kept, report=replace(train.report, overlapping=overlapping))


def _key(prompt: Prompt, dataset: PromptDataset, any_order: bool) -> str:
    text = prompt.prompt
    if not isinstance(text, str):
        text = _question(text, shown=2 * len(dataset.config.examples))
    text = unicodedata.normalize("NFKC", text).casefold()
    words = re.findall(r"\d+(?:[.,]\d+)*|\w+|[^\w\s]", text)
    return " ".join(sorted(words) if any_order else words)


def _question(turns: list[Message], shown: int) -> str:
    """A row's own turns: without the system message, and the messages of the examples before them."""
    own = turns[1:] if turns[0]["role"] == "system" else turns
    return "\n".join(turn["content"] for turn in own[shown:])
