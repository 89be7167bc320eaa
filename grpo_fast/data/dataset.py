"""Loads a dataset: rows in, tokenised prompts out; and keeps held-out questions out of the training set."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo_fast.config.data import PREFIX, DatasetConfig
from grpo_fast.config.secrets import masked
from grpo_fast.config.section import plural
from grpo_fast.data.files import Row, row_named
from grpo_fast.data.images import ImageReader, PromptImages, beside, row_images
from grpo_fast.data.render import Renderer, Tools
from grpo_fast.data.sources import read_rows
from grpo_fast.data.types import Prompt, own_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
OPENED = re.compile(r"(<\w+>)\s*\Z")
_SEES_NO_IMAGES = (
    "the row has an image, and the model reads text alone: give one that sees images, such as "
    "Qwen2.5-VL, or rename the column by dataset.rename = {image: another_name}"
)


@dataclass(frozen=True)
class LoadReport:
    """What became of the rows."""

    rows: int  # read from the source
    filtered: int = 0  # left out because their prompt is too long
    truncated: int = 0  # kept with the last max_prompt_length tokens
    overlapping: int = 0  # left out because the held-out set has them


@dataclass(frozen=True)
class PromptDataset(Sequence[Prompt]):
    """Prompts in the order of their rows. Slices are tuples."""

    prompts: tuple[Prompt, ...]
    config: DatasetConfig
    report: LoadReport

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: Any) -> Any:
        return self.prompts[index]

    @property
    def digest(self) -> str:
        """Of all that the policy and the rewards see; what JSON has not counts by its type alone."""
        digest = hashlib.sha256()
        for prompt in self:
            text = json.dumps(vars(prompt), default=_digest_of, skipkeys=True)
            digest.update(text.encode())
        return digest.hexdigest()[:16]

    @property
    def described(self) -> str:
        """`train.jsonl: 29 prompts of 32 rows (3 left out, in the held-out set)`."""
        report = self.report
        counts = {
            "left out, longer than max_prompt_length": report.filtered,
            "left out, in the held-out set": report.overlapping,
            "cut to max_prompt_length": report.truncated,
        }
        told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        source = masked(self.config.source)
        rows = f" of {plural(report.rows, 'row')} ({told})" if told else ""
        return f"{source}: {plural(len(self), 'prompt')}{rows}"


def load_prompts(
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None = None,
    images: ImageReader | None = None,
) -> PromptDataset:
    """Reads, renders and tokenises a dataset.

    Rows that are text reach the rewards as text, conversations as conversations (system prompt and examples
    included), whatever the chat template makes of them for the model.

    Args:
        config: where the rows are and how they become prompts.
        tokenizer: the model's.
        tools: schemas of what the model may call, for a row; the chat template shows them.
        images: reads a row's images, of `grpo_fast.policy.load_image_reader`; None: the model sees none.

    Raises:
        FileNotFoundError: a local file that is not there.
        ImportError: reasoning-gym is asked for and missing, or Pillow where rows have images.
        ValueError: a setting, a column or a row that makes no prompt; no prompt left.
    """
    return prompts_of(read_rows(config, tokenizer), config, tokenizer, tools, images)


def prompts_of(
    rows: Sequence[Row],
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None = None,
    images: ImageReader | None = None,
) -> PromptDataset:
    """Renders and tokenises rows; arguments and errors as of `load_prompts`."""
    config = _with_chat(config, rows, tools)
    render = Renderer(config, tokenizer, tools)
    prompts, texts, begun = [], [], []
    seen: dict[int, tuple[tuple[int, ...], PromptImages]] = {}
    for index, row in enumerate(rows):
        with row_named(config, index):
            prompt, shown = render.prompt_and_images(row)
            text = render.text(prompt, row, first=index == 0)
            if shown:
                if images is None:
                    raise ValueError(_SEES_NO_IMAGES)
                seen[index] = images.prompt(text, [beside(config.source, image) for image in shown])
            text.encode()  # half a surrogate pair has no UTF-8, and tokenizers raise a TypeError
        prompts.append(prompt)
        texts.append(text)
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            begun.append(index)
    if begun:
        logger.warning(
            "%d of %d prompts end with the assistant (%s, row %d the first): the model goes on with that "
            "turn; where it is the whole answer, take it out of the prompt",
            *(len(begun), len(rows), config.source, begun[0]),
        )
    # A chat template writes the special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=not render.chat, return_attention_mask=False, verbose=False)
    token_ids = [seen[row][0] if row in seen else tuple(ids) for row, ids in enumerate(encoded["input_ids"])]
    twice = (tokenizer.bos_token_id,) * 2
    if doubled := [row for row, ids in enumerate(token_ids) if ids[:2] == twice and row not in seen]:
        logger.warning(
            "%d of %d prompts (%s, row %d the first) begin with %r already; the tokenizer's own is left out",
            *(len(doubled), len(rows), config.source, doubled[0], tokenizer.bos_token),
        )
        token_ids = [ids[ids[:2] == twice :] for ids in token_ids]
    if () in token_ids:
        first = token_ids.index(())
        with row_named(config, first):
            raise ValueError(
                f"the tokenizer makes no tokens of the prompt {texts[first][:200]!r}; is it the model's own?"
            )
    kept, report = _fit(config, token_ids)
    others = [{key: value for key, value in row.items() if key != config.prompt_column} for row in rows]
    for index in seen:
        if index in kept and len(kept[index]) < len(token_ids[index]):
            with row_named(config, index):
                raise ValueError(
                    "dataset.overlong_prompts = 'truncate' would cut into a prompt with images; set it to "
                    "filter, or raise dataset.max_prompt_length"
                )
    made = []
    for index, ids in kept.items():
        opened = OPENED.search(texts[index])
        images_of = seen[index][1] if index in seen else None
        made.append(Prompt(index, prompts[index], ids, others[index], images_of, opened[1] if opened else ""))
    return PromptDataset(tuple(made), config, report)


def _with_chat(config: DatasetConfig, rows: Sequence[Row], tools: Tools | None) -> DatasetConfig:
    """Return the configuration with `chat: messages` decided by the first row."""
    if config.chat != "messages":
        return config
    text = config.prompt_template is not None or isinstance(rows[0].get(config.prompt_column), str)
    turns = tools is not None or config.system_prompt is not None or config.examples or row_images(rows[0])
    return config.model_copy(update={"chat": False if text and not turns else "auto"})


def _digest_of(value: Any) -> str:
    return value.digest if isinstance(value, PromptImages) else type(value).__name__


def load_held_out(
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None = None,
    images: ImageReader | None = None,
) -> PromptDataset:
    """`load_prompts` of `evaluation.dataset`; its errors say so."""
    try:
        return load_prompts(config, tokenizer, tools, images)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"evaluation: {error}") from error


def _fit(
    config: DatasetConfig, token_ids: list[tuple[int, ...]]
) -> tuple[dict[int, tuple[int, ...]], LoadReport]:
    """The prompts that stay, by row, within `max_prompt_length` tokens."""
    limit, rows, whole = config.max_prompt_length, len(token_ids), dict(enumerate(token_ids))
    too_long = {index: len(ids) for index, ids in whole.items() if limit is not None and len(ids) > limit}
    if limit is None or not too_long:
        return whole, LoadReport(rows)
    if config.overlong_prompts == "error":
        first = min(too_long)
        with row_named(config, first):
            raise ValueError(
                f"{len(too_long)} of {plural(rows, 'prompt')} exceed max_prompt_length = {limit} tokens, the "
                f"first has {too_long[first]}: raise it, or set dataset.overlong_prompts to filter"
            )
    if config.overlong_prompts == "truncate":
        # The question is at the end.
        return {index: ids[-limit:] for index, ids in whole.items()}, LoadReport(
            rows, truncated=len(too_long)
        )
    if len(too_long) == rows:
        raise ValueError(
            f"no prompt of {config.source} ({plural(rows, 'row')}) fits max_prompt_length = {limit} tokens "
            f"(the shortest has {min(too_long.values())}): raise it"
        )
    kept = {index: ids for index, ids in whole.items() if index not in too_long}
    return kept, LoadReport(rows, filtered=len(too_long))


def exclude_overlap(
    train: PromptDataset, held_out: PromptDataset, *, by_columns: bool = False
) -> PromptDataset:
    """Return the training prompts that are not in the held-out set; `report.overlapping` counts the others.

    Case, spacing, Unicode form, system prompts and the examples of the configurations do not count. Where
    either dataset is reasoning-gym's, nor does the order of words and symbols, as in `6 + 31` and `31 + 6`.

    Args:
        by_columns: rows of one prompt and other columns, which environments read, are different questions.

    Raises:
        ValueError: nothing is left to train on.
    """
    any_order = any(part.config.source.startswith(PREFIX) for part in (train, held_out))
    taken = {_key(prompt, held_out, any_order, by_columns) for prompt in held_out}
    kept = tuple(prompt for prompt in train if _key(prompt, train, any_order, by_columns) not in taken)
    if not kept:
        raise ValueError(
            f"all {len(train)} training prompts of {train.config.source} occur in the held-out set: "
            "give evaluation.dataset another split, or another seed some millions away"
        )
    overlapping = train.report.overlapping + len(train) - len(kept)
    return replace(train, prompts=kept, report=replace(train.report, overlapping=overlapping))


def _key(prompt: Prompt, dataset: PromptDataset, any_order: bool, by_columns: bool) -> tuple[str, str]:
    text = own_text(prompt, 2 * len(dataset.config.examples))
    text = unicodedata.normalize("NFKC", text).casefold()
    words = re.findall(r"\d+(?:[.,]\d+)*|\w+|[^\w\s]", text)
    columns = repr(sorted(prompt.columns.items())) if by_columns else ""
    if prompt.images is not None:
        columns += prompt.images.digest
    return " ".join(sorted(words) if any_order else words), columns
