"""Read rows from local files, the hub, a Python list, reasoning-gym or verifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from grpo_fast.config.data import PREFIX, SUFFIXES, VERIFIERS, DatasetConfig
from grpo_fast.config.lookup import FROM_PYTHON, choices, load_object
from grpo_fast.config.secrets import in_use, masked, redacted
from grpo_fast.data.files import Row, file_rows, files_of, typed_rows
from grpo_fast.data.tasksets import task_rows
from grpo_fast.data.transform import transformed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Arguments of a reward function that are not columns.
RESERVED = (
    *("prompts", "completions", "completion_ids", "environments"),
    *("trainer_state", "log_metric", "log_extra"),
)

_READ_BY = {"source", "name", "split", "options", "size", "seed", "rename", "transform", "prompt_column"}
_READ: ContextVar[dict[str, list[Row]]] = ContextVar("rows by their settings")


@contextmanager
def rows_read_once() -> Iterator[None]:
    """Inside, read and transform the rows of the same settings only once."""
    before = _READ.set({})
    try:
        yield
    finally:
        _READ.reset(before)


def read_rows(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> list[Row]:
    """Return the first `config.size` rows, transformed, then renamed; each row has every column.

    Raises FileNotFoundError for a missing file, ImportError for a missing library, and ValueError for a
    source that cannot be read, is empty or shorter than `size`, or has no such columns, or for a failing
    transform.
    """
    source, known, key = redacted(config.source), _READ.get({}), repr(config.model_dump(include=_READ_BY))
    if key in known:
        return known[key]
    rows = list(islice(_source_rows(config), config.size))
    if not rows:
        raise ValueError(f"dataset.source = {source!r} has no rows")
    if config.size is not None and len(rows) < config.size:
        raise ValueError(f"dataset.size = {config.size}, but {source} has {len(rows)} rows: lower it")
    if config.transform is not None:
        rows = transformed(_rename(rows, {}), config, tokenizer)
    rows = _rename(rows, config.rename)
    for name in RESERVED:
        if name in rows[0] and name != config.prompt_column:
            remedy = f"rename it: dataset.rename = {{{name}: another_name}}"
            raise ValueError(f"the column {name!r} has the name of an argument of the rewards; {remedy}")
    known[key] = rows
    return rows


def source_row(config: DatasetConfig, index: int) -> Row:
    return next(islice(_source_rows(config), index, None))


def _source_rows(config: DatasetConfig) -> Iterable[Row]:
    if config.source.startswith(PREFIX):
        task = config.source.removeprefix(PREFIX)
        options = in_use(config.options, "dataset.options")
        return generate_rows(task, seed=config.seed or 0, size=config.size, options=options)
    if config.source.startswith(VERIFIERS):
        return task_rows(config)
    if config.source.endswith(FROM_PYTHON):
        rows: Iterable[Row] = load_object(config.source, "dataset.source")
        return rows
    folder = Path(config.source).expanduser()
    if any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return _saved_rows(config, folder)
    files = files_of(config)
    return file_rows(files) if files else _hub_rows(config)


def _saved_rows(config: DatasetConfig, folder: Path) -> Iterable[Row]:
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise ValueError(f"dataset.source = {config.source!r} cannot be read: {error}") from error
    splits = found if isinstance(found, DatasetDict) else {"train": found, str(found.split or "train"): found}
    if config.split not in splits:
        raise ValueError(f"dataset.split = {config.split!r}: {choices(config.split, splits)}")
    return map(dict, splits[config.split])


def _hub_rows(config: DatasetConfig) -> Iterable[Row]:
    from datasets import DownloadManager, Features, Value, disable_progress_bars, load_dataset_builder
    from pandas import read_csv

    disable_progress_bars()
    try:
        builder = load_dataset_builder(config.source, config.name)
        is_csv = builder.name == "csv"
        if is_csv:  # read cells as text: pandas would turn 007 into 7, and NA into nothing
            get = DownloadManager()
            files = get.iter_files(get.download_and_extract([*chain(*builder.config.data_files.values())]))
            header = {**builder.config.pd_read_csv_kwargs, "nrows": 0, "chunksize": None}
            names = map(str, read_csv(next(iter(files)), **header).columns)
            as_text: Any = {"keep_default_na": False, "na_filter": False}
            as_text["features"] = Features(dict.fromkeys(names, Value("string")))
            builder = load_dataset_builder(config.source, config.name, **as_text)
        builder.download_and_prepare()
        rows = map(dict, builder.as_dataset(split=config.split))
        return typed_rows([*rows]) if is_csv else rows
    except Exception as error:
        problem = (
            f"cannot load dataset.source = {config.source!r} (name {config.name!r}, split {config.split!r}) "
            f"from the hub: {error}. A local file ends in {', '.join(SUFFIXES)}; a generated task is "
            f"{PREFIX}TASK"
        )
        raise ValueError(redacted(problem)) from error


def _rename(rows: list[Row], names: dict[str, str]) -> list[Row]:
    """Rename columns, and give every row each column, None by default."""
    columns = dict.fromkeys(key for row in rows for key in row)
    for old, new in names.items():
        if old not in columns:
            raise ValueError(f"dataset.rename: there is no column {old!r}: {choices(old, columns)}")
        if new in columns and new not in names:
            raise ValueError(f"dataset.rename: {old!r} cannot become {new!r}, which is a column already")
    if len(set(names.values())) < len(names):
        raise ValueError(f"dataset.rename = {names} gives two columns one name")
    return [{names.get(key, key): row.get(key) for key in columns} for row in rows]


def import_reasoning_gym() -> ModuleType:
    """Import the optional library; raise ImportError with the command that installs it."""
    try:
        import reasoning_gym
    except ImportError as error:
        remedy = "pip install 'grpo-fast[reasoning-gym]' (Python 3.11 or newer)"
        raise ImportError(f"tasks and scorers of reasoning-gym need that package: {remedy}") from error
    return reasoning_gym


def generate_rows(
    task: str, *, seed: int, size: int | None = None, options: Mapping[str, Any] | None = None
) -> list[Row]:
    """Generate rows of `prompt`, `question`, `answer`, `metadata` and `entry`, which the scorer needs.

    Item i is sampled with seed + i, so two sets share items if their seeds are closer than their sizes. Space
    seeds by millions, or see `exclude_overlap`. `size` is reasoning-gym's default if None.
    Raises ValueError for an unknown task or option, or a value that the task refuses.
    """
    import_reasoning_gym()
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}: {choices(task, DATASETS)}")
    options = dict(options or {})
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    for name in options:
        if name in ("seed", "size"):
            raise ValueError(f"dataset.options.{name} is set by dataset.{name}; move it there")
        if name not in known:
            raise ValueError(f"dataset.options.{name} is no option of {task}: {choices(name, known)}")
    if size is not None:
        options["size"] = size
    try:
        entries = list(create_dataset(task, seed=seed, **options))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{task} refuses dataset.options = {masked(options)}: {error}") from error
    own = ("question", "answer", "metadata")
    return [{"prompt": e["question"], **{name: e[name] for name in own}, "entry": e} for e in entries]
