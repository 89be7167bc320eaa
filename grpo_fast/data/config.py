"""Where prompts come from: the `dataset` section of the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from grpo_fast.section import PositiveInt, Section


class DatasetConfig(Section):
    """Where prompts come from, and how a row becomes one."""

    source: str = Field(description="JSONL, Parquet or CSV file, hub id, or `reasoning_gym:TASK`")
    name: str | None = Field(None, description="the hub dataset's configuration")
    split: str = Field("train", description="the hub dataset's split; a file is one split")
    prompt_column: str = "prompt"
    rename: dict[str, str] = Field({}, description="column in the data -> its name everywhere else")
    prompt_template: str | None = Field(
        None, description="str.format over the row's columns; makes the prompt"
    )
    chat: Literal["auto"] | bool = Field(
        "auto", description="text becomes a user turn of the chat template; auto: where the tokenizer has one"
    )
    system_prompt: str | None = None
    examples: list[tuple[str, str]] = Field(
        [], description="turns (user, assistant) shown before each prompt"
    )
    max_prompt_length: PositiveInt | None = None
    overlong_prompts: Literal["filter", "truncate", "error"] = "filter"
    size: PositiveInt | None = Field(None, description="rows to generate, or to keep")
    seed: int = 0
    options: dict[str, Any] = Field({}, description="passed to the generator of `reasoning_gym:TASK`")
