"""Build a teacher's prompts, with a demonstration or a successful completion of the same prompt.

SDFT (arXiv:2601.19897) and SDPO (arXiv:2601.20802) distill a model from itself: the teacher is the model with
more context, scoring completions that the student sampled without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.config.lookup import choices
from grpo_fast.config.policy import ReferenceConfig
from grpo_fast.data.files import row_named
from grpo_fast.data.render import Renderer
from grpo_fast.data.table import CompletionTable
from grpo_fast.data.types import Message, Prompt, text_of
from grpo_fast.loop.columns import EXTRA

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_fast.data import PromptDataset

CONTEXT = "context"  # the object: tokens of the teacher's prompt; None where it equals the policy's
FOUND = ("solution", "feedback")  # template fields from the rollout; all others are columns of the data


class TeacherContext:
    """Builds the teacher's prompt of each completion from `reference.prompt_template`."""

    def __init__(
        self, config: ReferenceConfig, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.template = str(config.prompt_template)
        self.threshold = config.success_threshold
        self.fields = config.fields
        self._render, self._tokenizer = Renderer(dataset.config, tokenizer), tokenizer
        for prompt in dataset:
            known = ["prompt", *FOUND, *(name for name, v in prompt.columns.items() if v is not None)]
            with row_named(dataset.config, prompt.index):
                for name in self.fields:
                    if name not in known:
                        raise ValueError(
                            f"reference.prompt_template names {{{name}}}, which the row does not have: "
                            f"{choices(name, known)} (rename a column with dataset.rename)"
                        )
        self.tokens(dataset[0], dict.fromkeys(FOUND, ""))

    def tokens(self, prompt: Prompt, found: Mapping[str, str]) -> tuple[int, ...]:
        """Return the teacher's prompt, in which the template replaces the user's last message."""
        asked = prompt.prompt
        turns: list[Message] = [] if isinstance(asked, str) else [dict(turn) for turn in asked]
        last = next((turn for turn in reversed(turns) if turn["role"] == "user"), None)
        question = asked if isinstance(asked, str) else "" if last is None else text_of(last["content"])
        values = {**prompt.columns, **found, "prompt": question}
        filled = self.template.format(**{name: _text(values[name]) for name in self.fields})
        if last is not None:
            last["content"] = filled
        text = self._render.text(turns or filled, prompt.columns)
        ids = self._tokenizer(text, add_special_tokens=not self._render.chat, verbose=False)["input_ids"]
        return tuple(ids)

    def of(self, table: CompletionTable) -> CompletionTable:
        """Add the object `context`; None where the template names only fields that the rollout lacks."""
        rewards, groups = table.facts["reward"].tolist(), table.groups.tolist()
        completions, logged = table.objects["completion"], table.objects.get(f"{EXTRA}feedback")
        successes: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            if rewards[row] >= self.threshold:
                successes.setdefault(group, []).append(row)
        asked = [name for name in FOUND if name in self.fields]
        contexts = []
        for row, prompt in enumerate(table.objects["prompt"]):
            sibling = next((other for other in successes.get(groups[row], ()) if other != row), None)
            found = {
                "solution": "" if sibling is None else completions[sibling].text,
                "feedback": "" if logged is None else str(logged[row] or ""),
            }
            sees_more = not asked or any(found[name] for name in asked)
            contexts.append(self.tokens(prompt, found) if sees_more else None)
        return table.with_objects(**{CONTEXT: tuple(contexts)})


def _text(value: Any) -> str:
    """Return a column as text; a conversation's is its last message."""
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = text_of(value[-1].get("content") or "")
    return str(value)


def seen_by_teacher(table: CompletionTable, rows: Tensor) -> CompletionTable:
    """Return the completions of some rows (S,) after the teacher's prompts."""
    places = rows.tolist()
    return CompletionTable.of(
        [table.objects[CONTEXT][row] for row in places],
        [table.tokens_of(row).tolist() for row in places],
        mask=[table.mask[table.offsets[row] : table.offsets[row + 1]].tolist() for row in places],
    )


def places_in(seen: CompletionTable, table: CompletionTable, rows: Tensor, batch: Any) -> Tensor:
    """Return, as (N,) int64, the token of `seen` that each target of the batch is."""
    sequence = batch.sequence_ids.cpu()
    shift = seen.offsets[:-1] - table.offsets[rows]
    return (batch.token_index.cpu() + shift[sequence]).to(torch.int64)
