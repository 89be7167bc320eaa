"""A Python call's objects as a configuration has them: rows as files, functions and callbacks by name.

Rows and sources are kept in the run's folder, under names that hold a digest of them. So a configuration says
which objects a run was made of, and a resumed run with others is refused like one with another setting.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fast.config.keys import ConfigError, Problem
from grpo_fast.config.lookup import OBJECT_MARK
from grpo_fast.config.record import INPUTS_DIR
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.section import short
from grpo_fast.data.images import as_json
from grpo_fast.record.callbacks import Callback

# What of a `dataset` section says how a row becomes a prompt.
RENDERING = (
    *("prompt_column", "rename", "prompt_template", "chat", "system_prompt", "examples"),
    *("max_prompt_length", "overlong_prompts"),
)


@dataclass
class Inputs:
    """A call's objects by the names that its configuration has for them, and the files that keep them."""

    objects: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)  # by name in the run's folder

    def plain(self, value: Any) -> Any:
        """A setting as a file would have it: paths as text, functions and callbacks by name."""
        if isinstance(value, Mapping):
            return {str(key): self.plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value]
        if isinstance(value, Path):
            return str(value)
        return self.name(value) if callable(value) or isinstance(value, Callback) else value

    def name(self, value: Any) -> str:
        """`module:name@digest of its source`, with `()` for an object of a class or a partial function."""
        known = value
        while isinstance(known, partial):
            known = known.func
        known = known if hasattr(known, "__qualname__") else type(known)
        called = "" if known is value else "()"
        source = source_of(known)
        if isinstance(value, partial):
            source += f"# with {value.args} {value.keywords}\n"
        path = f"{known.__module__}:{known.__qualname__}{called}"
        name = path = f"{path}{OBJECT_MARK}{digest(source) if source else 'no source'}"
        while self.objects.setdefault(name, value) is not value:  # another of one class, or of one line
            name = f"{path}+{len(self.objects)}"
        if source:
            stem = re.sub(r"\W+", "_", known.__qualname__)
            self.files[f"{INPUTS_DIR}/{stem}-{digest(source)}.py"] = source.encode()
        return name

    def model(self, value: Any) -> Any:
        if isinstance(value, str | Path | Mapping):
            return value if isinstance(value, Mapping) else {"path": value}
        remedy = "give a folder or hub id; save_pretrained makes a folder of a model and its tokenizer"
        raise _refused("model", f"is a {type(value).__name__}: {remedy}")

    def rewards(self, value: Any) -> list[Any]:
        entries = value if isinstance(value, list | tuple) else [value]
        return [one if isinstance(one, Mapping) else {"reward": one} for one in entries]

    def dataset(self, value: Any, key: str = "dataset") -> dict[str, Any]:
        """The section, its rows in a file."""
        if type(value).__name__.endswith("DatasetDict"):
            raise _refused(key, f"is several splits: give one of {', '.join(map(repr, value))}")
        section = dict(value) if isinstance(value, Mapping) else {"source": value}
        source = section.get("source", "")
        if not isinstance(source, str | Path):
            section["source"] = self.rows(source, key)
        return section

    def evaluation(self, value: Any) -> dict[str, Any]:
        section = {**value} if isinstance(value, Mapping) else {"dataset": value}
        if section.get("dataset") is not None:
            section["dataset"] = self.dataset(section["dataset"], "evaluation.dataset")
        return section

    def rows(self, rows: Any, key: str) -> str:
        """The name of the file that rows are kept in, as JSON lines."""
        if not isinstance(rows, Iterable):
            raise _refused(key, f"is a {type(rows).__name__}: give rows, a file or a hub id")
        lines = [_json_line(row, f"{key}[{index}]") for index, row in enumerate(rows)]
        if not lines:
            raise _refused(key, "has no rows")
        content = b"".join(lines)
        name = f"{INPUTS_DIR}/{key.removesuffix('.dataset')}-{digest(content)}.jsonl"
        self.files[name] = content
        return name

    def placed(self, config: TrainConfig, *, like_dataset: bool) -> TrainConfig:
        """The configuration with the rows' files under the run's folder.

        Args:
            like_dataset: held-out rows become prompts as the dataset's do.
        """

        def place(section: Any, **changes: Any) -> Any:
            if section.source in self.files:
                changes["source"] = str(Path(config.output_dir) / section.source)
            return section.model_copy(update=changes)

        changed = {"dataset": place(config.dataset)}
        if (held_out := config.evaluation.dataset) is not None:
            alike = {key: getattr(config.dataset, key) for key in RENDERING} if like_dataset else {}
            changed["evaluation"] = config.evaluation.model_copy(update={"dataset": place(held_out, **alike)})
        return config.model_copy(update=changed)


def source_of(value: Any) -> str:
    """The text of a function, or of a class's methods; empty where there is none."""
    if inspect.isclass(value):  # a notebook's class has no file, but its functions do
        return "".join(
            source_of(function) for function in vars(value).values() if inspect.isfunction(function)
        )
    try:
        if getattr(value, "__name__", "") != "<lambda>":
            return inspect.getsource(value)
        text = "".join(inspect.findsource(value)[0])
        lambdas = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda))
        line = value.__code__.co_firstlineno  # of a whole call, perhaps
        return "".join(f"{ast.get_source_segment(text, node)}\n" for node in lambdas if node.lineno == line)
    except (OSError, TypeError):
        return ""


def digest(content: str | bytes) -> str:
    """The first 16 digits of the SHA-256."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def _with_images(row: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """A row whose columns of images a file of JSON can hold."""
    try:
        if row.get("image") is not None:
            row = {**row, "image": as_json(row["image"])}
        if isinstance(row.get("images"), list | tuple):
            row = {**row, "images": [as_json(image) for image in row["images"]]}
    except (TypeError, ValueError) as error:
        raise _refused(place, str(error)) from error
    return row


def _refused(key: str, problem: str) -> ConfigError:
    return ConfigError("train", [Problem(key, problem)])


def _json_line(row: Any, place: str) -> bytes:
    if not isinstance(row, Mapping):
        remedy = "a row is a dict of columns; a pandas DataFrame gives them by to_dict('records')"
        raise _refused(place, f"is a {type(row).__name__} ({short(row)}): {remedy}")

    row = _with_images(row, place)
    options: Any = {"ensure_ascii": False, "allow_nan": False, "default": lambda array: array.tolist()}
    for column, value in row.items():
        try:
            json.dumps(value, **options)
        except (TypeError, ValueError, AttributeError):
            problem = f"holds {short(value)}, which JSON has not: make it text or a finite number"
            raise _refused(f"{place}[{column!r}]", problem) from None
    return json.dumps(row, **options).encode() + b"\n"
