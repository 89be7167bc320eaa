"""Load datasets as tokenized prompts, and keep held-out questions out of the training set."""

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
    "the row has an image, and the model reads only text: use a vision-language model, such as "
    "Qwen2.5-VL, or rename the column with dataset.rename = {image: another_name}"
)


@dataclass(frozen=True)
class LoadReport:
    """Counts of rows that were read, left out and truncated."""

    rows: int  # read from the source
    filtered: int = 0  # left out: longer than max_prompt_length
    truncated: int = 0  # kept with the last max_prompt_length tokens
    overlapping: int = 0  # left out: in the held-out set


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
        """Hash of all that the policy and the rewards see; objects that JSON lacks count by their type."""
        digest = hashlib.sha256()
        for prompt in self:
            text = json.dumps(vars(prompt), default=_digest_of, skipkeys=True)
            digest.update(text.encode())
        return digest.hexdigest()[:16]

    @property
    def described(self) -> str:
        """Describe the dataset: `train.jsonl: 29 prompts of 32 rows (3 left out, in the held-out set)`."""
        report = self.report
        counts = {
            "left out, longer than max_prompt_length": report.filtered,
            "left out, in the held-out set": report.overlapping,
            "cut to max_prompt_length": report.truncated,
        }
        changes = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        rows = f" of {plural(report.rows, 'row')} ({changes})" if changes else ""
        return f"{masked(self.config.source)}: {plural(len(self), 'prompt')}{rows}"


def load_prompts(
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None = None,
    images: ImageReader | None = None,
) -> PromptDataset:
    """Read, render and tokenize a dataset.

    Rewards get text rows as text, and conversations as conversations with the system prompt and the examples,
    independently of the chat template.

    Args:
        config: where the rows are and how they become prompts.
        tokenizer: the model's.
        tools: returns the JSON schemas of a row's tools, which the chat template shows.
        images: reads a row's images, from `grpo_fast.policy.load_image_reader`; None: a text-only model.

    Raises:
        FileNotFoundError: there is no such local file.
        ImportError: reasoning-gym, or Pillow for images, is needed and not installed.
        ValueError: a setting, a column or a row without a valid prompt; or no prompt is left.
    """
    return prompts_of(read_rows(config, tokenizer), config, tokenizer, tools, images)


def prompts_of(
    rows: Sequence[Row],
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None = None,
    images: ImageReader | None = None,
) -> PromptDataset:
    """Render and tokenize rows; arguments and errors as for `load_prompts`."""
    config = _with_chat(config, rows, tools)
    render = Renderer(config, tokenizer, tools)
    prompts, texts, continued = [], [], []
    seen: dict[int, tuple[tuple[int, ...], PromptImages]] = {}  # by row: tokens and images
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
            continued.append(index)
    if continued:
        logger.warning(
            "%d of %d prompts end with the assistant (%s, row %d the first): the model continues that turn; "
            "if the turn is a complete answer, remove it from the prompt",
            *(len(continued), len(rows), config.source, continued[0]),
        )
    # A chat template writes the special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=not render.chat, return_attention_mask=False, verbose=False)
    token_ids = [seen[row][0] if row in seen else tuple(ids) for row, ids in enumerate(encoded["input_ids"])]
    twice = (tokenizer.bos_token_id,) * 2
    if doubled := [row for row, ids in enumerate(token_ids) if ids[:2] == twice and row not in seen]:
        logger.warning(
            "%d of %d prompts (%s, row %d the first) begin with %r already; the tokenizer adds no second one",
            *(len(doubled), len(rows), config.source, doubled[0], tokenizer.bos_token),
        )
        token_ids = [ids[ids[:2] == twice :] for ids in token_ids]
    if () in token_ids:
        first = token_ids.index(())
        with row_named(config, first):
            raise ValueError(f"the tokenizer makes no tokens of {texts[first][:200]!r}; is it the model's?")
    kept, report = _fit(config, token_ids)
    made = []
    for index, ids in kept.items():
        prompt_images = seen[index][1] if index in seen else None
        if prompt_images and len(ids) < len(token_ids[index]):
            with row_named(config, index):
                raise ValueError(
                    "dataset.overlong_prompts = 'truncate' would cut into a prompt with images; set it to "
                    "filter, or raise dataset.max_prompt_length"
                )
        columns = {key: value for key, value in rows[index].items() if key != config.prompt_column}
        opened = OPENED.search(texts[index])
        begun = opened[1] if opened else ""
        made.append(Prompt(index, prompts[index], ids, columns, prompt_images, begun))
    return PromptDataset(tuple(made), config, report)


def _with_chat(config: DatasetConfig, rows: Sequence[Row], tools: Tools | None) -> DatasetConfig:
    """Resolve `chat: messages` by the first row."""
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
    """Call `load_prompts` for `evaluation.dataset`, and name the section in its errors."""
    try:
        return load_prompts(config, tokenizer, tools, images)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"evaluation: {error}") from error


def _fit(
    config: DatasetConfig, token_ids: list[tuple[int, ...]]
) -> tuple[dict[int, tuple[int, ...]], LoadReport]:
    """Return the prompts, by row, within `max_prompt_length` tokens."""
    rows, whole = len(token_ids), dict(enumerate(token_ids))
    limit = config.max_prompt_length or max(map(len, token_ids))
    too_long = {index: len(ids) for index, ids in whole.items() if len(ids) > limit}
    if not too_long:
        return whole, LoadReport(rows)
    if config.overlong_prompts == "error":
        first = min(too_long)
        with row_named(config, first):
            problem = f"{len(too_long)} of {plural(rows, 'prompt')} exceed max_prompt_length = {limit} tokens"
            remedy = "raise it, or set dataset.overlong_prompts to filter"
            raise ValueError(f"{problem}, the first has {too_long[first]}: {remedy}")
    if config.overlong_prompts == "truncate":
        last = {index: ids[-limit:] for index, ids in whole.items()}  # the question is at the end
        return last, LoadReport(rows, truncated=len(too_long))
    if len(too_long) == rows:
        problem = (
            f"no prompt of {config.source} ({plural(rows, 'row')}) fits max_prompt_length = {limit} tokens"
        )
        raise ValueError(f"{problem} (the shortest has {min(too_long.values())}): raise it")
    kept = {index: ids for index, ids in whole.items() if index not in too_long}
    return kept, LoadReport(rows, filtered=len(too_long))


def exclude_overlap(
    train: PromptDataset, held_out: PromptDataset, *, by_columns: bool = False
) -> PromptDataset:
    """Return the training prompts that are not in the held-out set; `report.overlapping` counts the others.

    The comparison ignores case, spacing, Unicode form, system prompts and configured examples. With data of
    reasoning-gym, it also ignores the order of words and symbols, as in `6 + 31` and `31 + 6`. `by_columns`
    compares the other columns, too, for environments that read them.
    Raises ValueError if nothing is left to train on.
    """
    any_order = any(part.config.source.startswith(PREFIX) for part in (train, held_out))
    taken = {_key(prompt, held_out, any_order, by_columns) for prompt in held_out}
    kept = tuple(prompt for prompt in train if _key(prompt, train, any_order, by_columns) not in taken)
    if not kept:
        remedy = "set another evaluation.dataset.split, or a seed some millions away"
        raise ValueError(f"all training prompts of {train.config.source} occur in the held-out set: {remedy}")
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
