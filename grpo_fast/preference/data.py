"""Tokenize datasets of pairs, labelled completions or ranked groups; `rows` describes the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.lookup import choices
from grpo_fast.config.preference import PreferenceConfig
from grpo_fast.config.section import short
from grpo_fast.data import PromptDataset
from grpo_fast.data.files import row_named
from grpo_fast.data.render import Renderer
from grpo_fast.data.types import Message, Prompt
from grpo_fast.preference.comparison import Comparison
from grpo_fast.preference.rows import PairRow, RankedGroup, answers, read_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CompletionTokenizer:
    """Tokenizes the completions of one dataset's prompts, each with the token that ends its turn.

    Args:
        max_length: the most tokens of a completion; None for no limit.
        end_ids: tokens that end a turn, in addition to the tokenizer's end token.
        limit: the configuration key of `max_length`, for errors.
    """

    def __init__(
        self,
        config: DatasetConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None,
        end_ids: Sequence[int],
        limit: str = "preference.max_completion_length",
    ) -> None:
        self._limit = limit
        self._render = Renderer(config, tokenizer)
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._end_ids = [i for i in dict.fromkeys((tokenizer.eos_token_id, *end_ids)) if i is not None]
        if not self._end_ids:
            raise ValueError(
                "the tokenizer has no end token, so a completion would never end; set its eos_token"
            )

    def __call__(self, prompt: Prompt, completion: str | list[Message], field: str) -> tuple[int, ...]:
        """Return the tokens up to the first end token, where sampling stops; errors name `field`."""
        text = completion if isinstance(completion, str) else _reply(prompt, completion, field)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{field} = {text!r} must be text that is not empty, or a list of messages")
        answer = self._render.answer(prompt.prompt, text)
        ids = self._tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
        ids.append(self._end_ids[0])
        ids = ids[: 1 + next(i for i, token in enumerate(ids) if token in self._end_ids)]
        if self._max_length is not None and len(ids) > self._max_length:
            raise ValueError(
                f"{field} has {len(ids)} tokens and {self._limit} is {self._max_length}; "
                "raise it, or remove the row"
            )
        return tuple(ids)


def load_comparisons(
    prompts: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    preference: PreferenceConfig,
    *,
    ranks: bool,
    seed: int,
    end_ids: Sequence[int] = (),
    held_out: bool = False,
) -> list[Comparison]:
    """Return the comparison of each prompt, with completions from its columns or from `preference.answers`.

    Args:
        ranks: rows are ranked groups (`algorithm: rank`) rather than pairs or labelled completions.
        end_ids: tokens that end a turn, in addition to the tokenizer's end token.
        held_out: for evaluation, where KTO also reads pairs.
    """
    complete = CompletionTokenizer(prompts.config, tokenizer, preference.max_completion_length, end_ids)
    labelled = not ranks and not preference.loss.paired and not held_out
    read = _ranked if ranks else _labelled if labelled else _pair
    comparisons = []
    for prompt in prompts:
        with row_named(prompts.config, prompt.index):
            columns = dict(prompt.columns)
            if preference.answers is not None and not labelled:
                columns["group"] = made = answers(prompt, preference.answers, seed)
                columns |= {"chosen": made[0]["response"], "rejected": made[1]["response"]}
            comparison = read(prompt, columns, complete)
            if not ranks and not held_out:
                numbers = {name: float(columns[name]) for name in preference.loss.columns}
                comparison = replace(comparison, columns=numbers)
            if comparison.margin and not ranks and not held_out:
                preference.loss.check_margins()  # here rather than at the first step with such a row
        comparisons.append(comparison)
    return comparisons


def _pair(prompt: Prompt, columns: Mapping[str, Any], complete: CompletionTokenizer) -> Comparison:
    chosen, rejected = (complete(prompt, column(columns, name), name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same; remove the row")
    row = read_row(PairRow, columns)
    return Comparison(prompt, (chosen, rejected), (1.0, 0.0), row.margin, row.weight)


def _labelled(prompt: Prompt, columns: Mapping[str, Any], complete: CompletionTokenizer) -> Comparison:
    completion = complete(prompt, column(columns, "completion"), "completion")
    label = column(columns, "label")
    if label not in (True, False):
        raise ValueError(f"label = {label!r} must be true (desirable) or false")
    row = read_row(PairRow, columns)
    return Comparison(prompt, (completion,), (float(label),), row.margin, row.weight)


def _ranked(prompt: Prompt, columns: Mapping[str, Any], complete: CompletionTokenizer) -> Comparison:
    column(columns, "group")
    row = read_row(RankedGroup, columns)
    return Comparison(
        prompt,
        tuple(complete(prompt, item.response, f"group[{i}].response") for i, item in enumerate(row.group)),
        grades=tuple(item.grade for item in row.group),
        weight=row.weight,
        group_type=row.group_type,
        behaviour_logprobs=tuple(item.logprob for item in row.group),
    )


def _reply(prompt: Prompt, messages: list[Message], field: str) -> str | None:
    """Return the assistant's reply in a conversation that may repeat the prompt's turns."""
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"{field} = {short(messages)} must be text or a list of messages")
    text = prompt.prompt
    asked = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
    turns = [{"role": message.get("role"), "content": message.get("content")} for message in messages]
    repeated = len(turns) - 1
    if not turns or turns[-1]["role"] != "assistant" or turns[:-1] != asked[len(asked) - repeated :]:
        raise ValueError(
            f"{field} must be one message of the assistant, which the prompt's own turns may precede; got "
            f"the roles {[turn['role'] for turn in turns]}"
        )
    return turns[-1]["content"]


def column(columns: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row, whose missing columns are null."""
    if columns.get(name) is None:
        held = [key for key, value in columns.items() if value is not None]
        raise ValueError(
            f"the row has no {name!r}: {choices(name, held)} (rename a column with dataset.rename)"
        )
    return columns[name]
