"""Where prompts come from: the `dataset` section of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_fast.section import PositiveInt, Section, Seed

PREFIX = "reasoning_gym:"
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


class DatasetConfig(Section):
    """Where prompts come from, and how a row becomes one."""

    source: str = Field(description="JSONL, Parquet or CSV file, a folder, hub id, or `reasoning_gym:TASK`")
    name: str | None = Field(None, description="the hub dataset's configuration; in a folder, a folder")
    split: str = Field(
        "train", description="of a hub dataset; in a folder, how its files' names begin; a file has none"
    )
    prompt_column: str = Field("prompt", description="text, or a list of messages {role, content}")
    rename: dict[str, str] = Field({}, description="column in the data -> its name everywhere else")
    prompt_template: str | None = Field(
        None, description="str.format over the row's columns; makes the prompt"
    )
    chat: Literal["auto"] | bool = Field(
        "auto", description="text becomes a user turn of the chat template; auto: where the tokenizer has one"
    )
    system_prompt: str | None = Field(None, description="goes before every prompt")
    examples: list[tuple[str, str]] = Field(
        [], description="turns (user, assistant) shown before each prompt"
    )
    max_prompt_length: PositiveInt | None = Field(
        None, description="tokens, the chat template's included; null: no limit"
    )
    overlong_prompts: Literal["filter", "truncate", "error"] = Field(
        "filter", description="what becomes of prompts above max_prompt_length; truncate keeps their end"
    )
    size: PositiveInt | None = Field(None, description="rows to generate, or to keep")
    seed: Seed = Field(
        0, description="of the generator of `reasoning_gym:TASK`: row i is drawn from seed + i"
    )
    options: dict[str, Any] = Field({}, description="passed to the generator of `reasoning_gym:TASK`")

    @model_validator(mode="after")
    def _read_by_its_source(self) -> DatasetConfig:
        task, file = self.source.startswith(PREFIX), Path(self.source).suffix in SUFFIXES
        unread = {"name": task or file, "split": task or file, "seed": not task, "options": not task}
        for key in (key for key, ignored in unread.items() if ignored):
            value = getattr(self, key)
            if value != type(self).model_fields[key].get_default():
                raise ValueError(f"{key} = {value!r} is not read for source = {self.source!r}; leave it out")
        return self
