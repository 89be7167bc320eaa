"""Where prompts come from: the `dataset` section of the configuration."""

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


# What decides how a row becomes a prompt; `evaluation.dataset` has that of `dataset` where it says nothing.
RENDERING = (
    *("transform", "prompt_column", "rename", "prompt_template", "chat", "system_prompt", "examples"),
    *("chat_template_kwargs", "max_prompt_length", "overlong_prompts"),
)
_OF_SOURCE = ("source", "name", "options")  # inherited, too, where the source is the same


class DatasetConfig(Section):
    """Where prompts come from, and how a row becomes one."""

    source: str = Field(
        description="JSONL, Parquet, CSV or TSV file, folder, hub id, `reasoning_gym:TASK`, "
        "`verifiers:TASKSET`"
    )
    name: str | None = Field(None, description="the hub dataset's configuration; in a folder, a folder")
    split: str = Field(
        "train", description="of a hub dataset; in a folder, how its files' names begin; a file has none"
    )
    transform: str | None = Field(
        None,
        description="`module:function` or `path/to/file.py:function`: gets a row, returns the columns to add "
        "or replace, before `rename`; with the signature of Axolotl's or of `datasets.Dataset.map`",
    )
    prompt_column: str = Field("prompt", description="text, or a list of messages {role, content}")
    rename: dict[str, str] = Field({}, description="column in the data -> its name everywhere else")
    prompt_template: str | None = Field(
        None, description="str.format over the row's columns; makes the prompt"
    )
    chat: Literal["auto", "messages"] | bool = Field(
        "auto",
        description="text becomes a user turn of the chat template; auto: where the tokenizer has one; "
        "messages: where a system prompt, examples or tools make turns of it, else the model gets it as it "
        "is, as in TRL",
    )
    system_prompt: str | None = Field(None, description="goes before every prompt")
    examples: list[Annotated[tuple[str, str], Field(strict=False)]] = Field(
        [], description="turns (user, assistant) shown before each prompt"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="variables of the chat template, such as `enable_thinking: false`"
    )
    max_prompt_length: PositiveInt | None = Field(
        None, description="tokens, the chat template's included; null: no limit"
    )
    overlong_prompts: Literal["filter", "truncate", "error"] = Field(
        "filter", description="what becomes of prompts above max_prompt_length; truncate keeps their end"
    )
    size: PositiveInt | None = Field(None, description="rows to generate, or to keep")
    seed: Seed | None = Field(
        None,
        description="of the generator of `reasoning_gym:TASK`: row i is drawn from seed + i, null is 0; "
        "of the order of `verifiers:TASKSET`, null is its own",
    )
    options: dict[str, Any] = Field(
        {},
        description="passed to the generator of `reasoning_gym:TASK`; of `verifiers:TASKSET` its `env` "
        "block, and that library's `select`",
    )

    @property
    def is_taskset(self) -> bool:
        """Whether the prompts, and their rewards, are those of the verifiers library."""
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
    """Return the settings of `evaluation.dataset` with those that it takes from `dataset`."""
    given, below = (
        one.model_dump(exclude_unset=True) if isinstance(one, DatasetConfig) else one
        for one in (held_out, dataset)
    )
    if not (isinstance(given, Mapping) and isinstance(below, Mapping)):
        return held_out
    same = given.get("source", below.get("source")) == below.get("source")
    keys = (*RENDERING, *_OF_SOURCE) if same else RENDERING
    return {**{key: below[key] for key in keys if key in below}, **given}
