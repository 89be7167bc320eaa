"""Datasets in, tokenised comparisons out: pairs, labelled completions or ranked groups.

| algorithm | a row |
|---|---|
| dpo | `prompt`, `chosen`, `rejected`, optional `margin` and `weight` |
| dpo with `loss_type: kto` | `prompt`, `completion`, `label` (true: desirable), optional `weight` |
| rank | `prompt`, `group`, optional `group_type` and `weight`; see `ranked` |

Prompt and completions are text or conversations. With `preference.answers` the completions of `dpo` and
`rank` are `rank` are made from the row's answer instead. The held-out set of a KTO run holds pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from grpo_fast.data import PromptDataset, load_prompts
from grpo_fast.data.config import DatasetConfig
from grpo_fast.data.render import Renderer
from grpo_fast.data.types import Message, Prompt
from grpo_fast.objective.pairs import PreferenceLossConfig
from grpo_fast.preference.answers import answer_group
from grpo_fast.preference.comparison import Comparison
from grpo_fast.preference.ranked import RankedGroup, parse_group, read_ranked

if TYPE_CHECKING:
    from grpo_fast.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Completions:
    """Tokenises the completions of one dataset's prompts, each with the token that ends its turn.

    Args:
        config: the dataset's settings; they decide the chat template's use as for the prompts.
        max_length: tokens a completion may have; None: any number.
        end_ids: tokens that end a turn; None: the tokenizer's end token.

    Raises:
        ValueError: there is no end token.
    """

    def __init__(
        self,
        config: DatasetConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        end_ids: Sequence[int] | None = None,
    ) -> None:
        self._render = Renderer(config, tokenizer)
        self._tokenizer = tokenizer
        self._max_length = max_length
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._end_ids = own + [token for token in end_ids or () if token not in own]
        if not self._end_ids:
            raise ValueError(
                "the tokenizer has no end token, so a completion would never end; set its eos_token"
            )

    def __call__(self, prompt: Prompt, completion: str | list[Message], field: str) -> tuple[int, ...]:
        """Raises ValueError naming the row and `field` for a completion that is malformed or too long."""
        where = f"row {prompt.index}: {field}"
        text = completion if isinstance(completion, str) else _reply(prompt, completion, where)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where} = {text!r} must be text that is not empty, or a list of messages")
        answer = self._render.answer(prompt.index, prompt.prompt, text)
        ids = self._ended(self._tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"])
        if self._max_length is not None and len(ids) > self._max_length:
            raise ValueError(
                f"{where} has {len(ids)} tokens and preference.max_completion_length is {self._max_length}; "
                "raise it, or remove the row"
            )
        return ids

    def _ended(self, ids: list[int]) -> tuple[int, ...]:
        """Up to the first end token: sampling stops there, whatever the template writes after it."""
        end = next((i for i, token in enumerate(ids) if token in self._end_ids), None)
        return (*ids, self._end_ids[0]) if end is None else tuple(ids[: end + 1])


def load_questions(
    dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase, config: TrainConfig
) -> PromptDataset:
    """The prompts of a dataset of comparisons.

    A file of ranked groups is read line by line first: Arrow reports a wrong type by column, for the whole
    file.

    Raises:
        ValueError: a line that is no group, or what `load_prompts` refuses.
    """
    ranked = config.algorithm == "rank" and config.preference.answers is None
    if (
        ranked
        and dataset.source.endswith(".jsonl")
        and not dataset.rename
        and dataset.prompt_column == "prompt"
    ):
        read_ranked(dataset.source)
    return load_prompts(dataset, tokenizer)


def load_comparisons(
    prompts: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    *,
    end_ids: Sequence[int] | None = None,
    held_out: bool = False,
) -> dict[int, Comparison]:
    """The comparisons of loaded prompts, by the prompt's row.

    Args:
        prompts: as `load_questions` gives them, whatever columns they have.
        config: decides what a row is.
        end_ids: tokens that end a turn; None: the tokenizer's end token.
        held_out: for evaluation, where KTO too is judged on pairs.

    Raises:
        ValueError: a row that is malformed, or that holds what the loss has no place for; the message names
            the row, the field and the remedy.
    """
    complete = Completions(prompts.config, tokenizer, config.preference.max_completion_length, end_ids)
    read: Callable[[Prompt, Completions, TrainConfig], Comparison] = _pair
    if config.algorithm == "rank":
        read = _ranked
    elif not config.preference.loss.paired and not held_out:
        read = _labelled
    comparisons = {prompt.index: read(prompt, complete, config) for prompt in prompts}
    if config.algorithm == "dpo" and not held_out:
        _check_places(comparisons, config.preference.loss)
    return _mismatch(comparisons) if read is _labelled else comparisons


def _check_places(comparisons: Mapping[int, Comparison], loss: PreferenceLossConfig) -> None:
    """At the start rather than at the first step that meets such a row."""
    for index, comparison in comparisons.items():
        if comparison.margin and not any(facts.takes_margins for facts in loss.facts):
            raise ValueError(
                f"row {index}: loss_type = {loss.loss_type!r} has no place for a margin (here "
                f"{comparison.margin}); remove the column, or use weights"
            )
        if comparison.weight != 1.0 and loss.couples:
            raise ValueError(
                f"row {index}: loss_type = {loss.loss_type!r} sorts the pairs and has no place for a weight "
                f"(here {comparison.weight}); remove the column"
            )


def _pair(prompt: Prompt, complete: Completions, config: TrainConfig) -> Comparison:
    columns = prompt.columns
    if config.preference.answers is not None:
        right, *wrong = answer_group(prompt, config.preference.answers, config.seed).responses
        columns = {**columns, "chosen": right.response, "rejected": wrong[0].response}
    chosen, rejected = (
        complete(prompt, _column(prompt, columns, name), name) for name in ("chosen", "rejected")
    )
    if chosen == rejected:
        raise ValueError(f"row {prompt.index}: chosen and rejected are the same; remove the row")
    return Comparison(
        prompt,
        (chosen, rejected),
        grades=(1.0, 0.0),
        margin=_number(prompt, columns, "margin", 0.0),
        weight=_weight(prompt, columns),
    )


def _labelled(prompt: Prompt, complete: Completions, config: TrainConfig) -> Comparison:
    completion = complete(prompt, _column(prompt, prompt.columns, "completion"), "completion")
    label = _column(prompt, prompt.columns, "label")
    if label not in (True, False):
        raise ValueError(f"row {prompt.index}: label = {label!r} must be true (desirable) or false")
    return Comparison(
        prompt,
        (completion,),
        grades=(float(label),),
        margin=_number(prompt, prompt.columns, "margin", 0.0),
        weight=_weight(prompt, prompt.columns),
    )


def _ranked(prompt: Prompt, complete: Completions, config: TrainConfig) -> Comparison:
    if config.preference.answers is not None:
        group = answer_group(prompt, config.preference.answers, config.seed)
    else:
        group = parse_group(prompt.columns, f"row {prompt.index}", prompt.prompt)
    return ranked_comparison(prompt, group, complete)


def ranked_comparison(prompt: Prompt, group: RankedGroup, complete: Completions) -> Comparison:
    """A ranked group, tokenised."""
    logprobs = tuple(response.logprob for response in group.responses)
    return Comparison(
        prompt,
        tuple(
            complete(prompt, response.response, f"group[{i}].response")
            for i, response in enumerate(group.responses)
        ),
        grades=tuple(response.grade for response in group.responses),
        weight=group.weight,
        group_type=group.group_type,
        behaviour_logprobs=logprobs if any(logprob is not None for logprob in logprobs) else None,
    )


def _mismatch(comparisons: dict[int, Comparison]) -> dict[int, Comparison]:
    """Give each prompt the completion of the next row, as KTO's reference point wants it."""
    rows = list(comparisons.values())
    if len(rows) < 2:
        raise ValueError(
            "kto needs at least two rows: its reference point pairs prompts with others' completions"
        )
    following = rows[1:] + rows[:1]
    return {
        index: replace(row, mismatched_ids=other.completion_ids[0])
        for (index, row), other in zip(comparisons.items(), following, strict=True)
    }


def _reply(prompt: Prompt, messages: list[Message], where: str) -> str:
    """The assistant's reply in a conversation that may repeat the prompt's turns before it."""
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"{where} = {str(messages)[:80]!r} must be text or a list of messages")
    asked = (
        [{"role": "user", "content": prompt.prompt}]
        if isinstance(prompt.prompt, str)
        else list(prompt.prompt)
    )
    turns = [{"role": message.get("role"), "content": message.get("content")} for message in messages]
    repeated = len(turns) - 1
    if not turns or turns[-1]["role"] != "assistant" or turns[:-1] != asked[len(asked) - repeated :]:
        raise ValueError(
            f"{where} must be one message of the assistant, which the prompt's own turns may precede; got "
            f"the roles {[turn['role'] for turn in turns]}"
        )
    return turns[-1]["content"]


def _column(prompt: Prompt, columns: Mapping[str, Any], name: str) -> Any:
    if columns.get(name) is None:
        raise ValueError(
            f"row {prompt.index} has no {name!r}; there are {', '.join(sorted(columns)) or 'no columns'} "
            "(rename them with dataset.rename)"
        )
    return columns[name]


def _number(prompt: Prompt, columns: Mapping[str, Any], name: str, default: float) -> float:
    value = columns.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"row {prompt.index}: {name} = {value!r} must be a finite number")
    return float(value)


def _weight(prompt: Prompt, columns: Mapping[str, Any]) -> float:
    weight = _number(prompt, columns, "weight", 1.0)
    if weight < 0:
        raise ValueError(
            f"row {prompt.index}: weight = {weight} must not be negative; swap the completions instead"
        )
    return weight
