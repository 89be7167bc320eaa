"""The section `dataset`: the source of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_fast.config.lookup import FROM_PYTHON
from grpo_fast.config.section import PositiveInt, Section, Seed
from grpo_fast.objective.config import refuse_unread

PREFIX = "reasoning_gym:"
VERIFIERS = "verifiers:"
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")


# How a row becomes a prompt; `evaluation.dataset` inherits these keys from `dataset`.
RENDERING = (
    *("transform", "prompt_column", "rename", "prompt_template", "chat", "system_prompt", "examples"),
    *("chat_template_kwargs", "max_prompt_length", "overlong_prompts"),
)
_OF_SOURCE = ("source", "name", "options")  # inherited, too, where the source is the same


class DatasetConfig(Section):
    """The source of prompts, and how a row becomes a prompt."""

    source: str = Field(
        description="JSONL, JSON, Parquet, CSV or TSV file, folder, hub id, `reasoning_gym:TASK` or "
        "`verifiers:TASKSET`",
    )
    name: str | None = Field(None, description="configuration of a hub dataset; a subfolder of a folder")
    split: str = Field("train", description="split of a hub dataset; in a folder, the prefix of file names")
    transform: str | None = Field(
        None,
        description="`module:function` or `path/to/file.py:function` from a row to the columns to add or "
        "replace, before `rename`; takes the signature of Axolotl or of `datasets.Dataset.map`",
    )
    prompt_column: str = Field("prompt", description="text, or a list of messages {role, content}")
    rename: dict[str, str] = Field({}, description="column in the data -> new name")
    prompt_template: str | None = Field(None, description="makes the prompt, by str.format over the row")
    chat: Literal["auto", "messages"] | bool = Field(
        "auto",
        description="whether a text prompt becomes a user message of the chat template; auto: if the "
        "tokenizer has one; messages: only with a system prompt, examples or tools, as in TRL",
    )
    system_prompt: str | None = Field(None, description="system message of every prompt")
    examples: list[Annotated[tuple[str, str], Field(strict=False)]] = Field(
        [], description="few-shot examples: (user, assistant) messages before each prompt"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="variables of the chat template, such as `enable_thinking: false`"
    )
    max_prompt_length: PositiveInt | None = Field(
        None, description="tokens, including those of the chat template; null: no limit"
    )
    overlong_prompts: Literal["filter", "truncate", "error"] = Field(
        "filter", description="for prompts above max_prompt_length; truncate keeps their end"
    )
    size: PositiveInt | None = Field(None, description="number of rows to generate or keep; null: all")
    seed: Seed | None = Field(None, description="of a generator; null: 0, of `verifiers:TASKSET` its own")
    options: dict[str, Any] = Field(
        {},
        description="options of `reasoning_gym:TASK`'s generator; for `verifiers:TASKSET` its `env` block "
        "and the library's `select`",
    )

    @property
    def is_taskset(self) -> bool:
        """Whether the verifiers library gives the prompts and their rewards."""
        return self.source.startswith(VERIFIERS)

    @property
    def idle_keys(self) -> tuple[str, ...]:
        """Keys that only other sources read."""
        if self.source.startswith((PREFIX, VERIFIERS)):
            return ("name", "split")
        one_file = Path(self.source).suffix in SUFFIXES or self.source.endswith(FROM_PYTHON)
        return ("name", "split", "seed", "options") if one_file else ("seed", "options")

    @model_validator(mode="after")
    def _reads_what_is_set(self) -> DatasetConfig:
        refuse_unread(self, self.idle_keys, f"with source = {self.source!r}")
        return self


def with_inherited(held_out: Any, dataset: Any) -> Any:
    """Return the settings of `evaluation.dataset` with those that it inherits from `dataset`."""
    given, below = (
        one.model_dump(exclude_unset=True) if isinstance(one, DatasetConfig) else one
        for one in (held_out, dataset)
    )
    if not (isinstance(given, Mapping) and isinstance(below, Mapping)):
        return held_out
    same = given.get("source", below.get("source")) == below.get("source")
    keys = (*RENDERING, *_OF_SOURCE) if same else RENDERING
    return {**{key: below[key] for key in keys if key in below}, **given}
