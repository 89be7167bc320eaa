"""Name the objects of a Python call, so that a configuration can refer to them.

A configuration has `module:name@python` for a function or object, and `dataset@python` for rows. The same
call gives the same names, so a resumed run finds its objects when the call is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.lookup import FROM_PYTHON
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.section import short
from grpo_fast.record.callbacks import Callback
from grpo_fast.run.arguments import refused
from grpo_fast.run.loaded import Loaded


class Inputs:
    """The objects of one call, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.loaded = Loaded()

    def plain(self, value: Any) -> Any:
        """Return a setting as a file has it: paths as text, functions and objects by name."""
        if isinstance(value, Mapping):
            return {str(key): self.plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value]
        if isinstance(value, Path):
            return str(value)
        kind = value if isinstance(value, type) else type(value)
        if "TrainerCallback" in (base.__name__ for base in kind.__mro__):
            remedy = "derive from grpo_fast.Callback, whose on_step_end gets a step's metrics"
            raise refused("callbacks", f"has transformers' TrainerCallback {kind.__name__}: {remedy}")
        return self.name(value) if callable(value) or isinstance(value, Callback) else value

    def name(self, value: Any) -> str:
        """Return the name of a function, class or object; each object has its own."""
        known = value
        while isinstance(known, partial):
            known = known.func
        known = known if hasattr(known, "__qualname__") else type(known)
        path, number = f"{known.__module__}:{known.__qualname__}", 1
        name = f"{path}{FROM_PYTHON}"
        while self.objects.setdefault(name, value) is not value:  # another object of one class or one name
            number += 1
            name = f"{path}_{number}{FROM_PYTHON}"
        return name

    def model(self, value: Any) -> Any:
        if isinstance(value, str | Path | Mapping):
            return value if isinstance(value, Mapping) else {"path": value}
        return self.loaded.section(value)

    def rewards(self, value: Any) -> list[Any]:
        entries = value if isinstance(value, list | tuple) else [value]
        if models := [type(one).__name__ for one in entries if hasattr(one, "state_dict")]:
            remedy = "rewards here are functions: call it inside one, (prompts, completions, **columns)"
            raise refused("rewards", f"has a model, {models[0]}; {remedy}")
        return [one if isinstance(one, Mapping) else {"reward": one} for one in entries]

    def reward_funcs(self, value: Any) -> list[Any]:
        """Return functions or names; `reward_weights` has their weights."""
        entries = self.rewards(value)
        if any(entry.keys() != {"reward"} for entry in entries):
            remedy = "give them as rewards, or functions and reward_weights"
            raise refused("reward_funcs", f"has sections; {remedy}")
        return [entry["reward"] for entry in entries]

    def dataset(self, value: Any, key: str = "dataset") -> dict[str, Any]:
        """Return the section, with a name in the place of rows."""
        if _is_splits(value):
            raise refused(key, f"is several splits: give one of {', '.join(map(repr, value))}")
        section = dict(value) if isinstance(value, Mapping) else {"source": value}
        source = section.get("source", "")
        if not isinstance(source, str | Path):
            if not isinstance(source, Iterable):
                raise refused(key, f"is a {type(source).__name__}: give rows, a file or a hub id")
            section["source"] = f"{key}{FROM_PYTHON}"
            self.objects[section["source"]] = source
        return section

    def read(self, config: TrainConfig) -> None:
        """Read each object's rows once; from a stream, which may be endless, only those the run needs."""
        sizes: dict[str, dict[str, int | None]] = {}  # of each object, by section
        sections = {"dataset": config.dataset, "evaluation.dataset": config.evaluation.dataset}
        for key, section in sections.items():
            if section is not None and section.source in self.objects:
                sizes.setdefault(section.source, {})[key] = section.size
        for source, wanted in sizes.items():
            rows = self.objects[source]
            needed = None if hasattr(rows, "__len__") else _of_stream(rows, wanted, config)
            self.objects[source] = _rows(islice(rows, needed), next(iter(wanted)))

    def evaluation(self, value: Any) -> dict[str, Any]:
        section = {"dataset": value}
        if isinstance(value, Mapping) and not _is_splits(value):
            section = {**value}
        if section.get("dataset") is not None:
            section["dataset"] = self.dataset(section["dataset"], "evaluation.dataset")
        return section


def _of_stream(rows: Any, wanted: Mapping[str, int | None], config: TrainConfig) -> int:
    """Return how many rows of a stream the sections need: those of all steps where training has no size."""
    sizes = []
    for key, size in wanted.items():
        if size is None and (config.epochs or key != "dataset"):
            remedy = f"{key}.size" if key != "dataset" else "max_steps, or dataset.size"
            kind = type(rows).__name__
            raise refused(key, f"is a stream ({kind}), whose length is not known; set {remedy}")
        sizes.append(size or config.max_steps * config.prompts_per_step)
    return max(sizes)


def _is_splits(value: Any) -> bool:
    """Return whether a mapping holds rows by split rather than a section."""
    if not isinstance(value, Mapping) or value.keys() & {*DatasetConfig.model_fields, "dataset"}:
        return False
    return bool(value) and all(
        hasattr(rows, "__iter__") and not isinstance(rows, str) for rows in value.values()
    )


def _rows(rows: Iterable[Any], key: str) -> list[dict[str, Any]]:
    """Return rows with NumPy arrays and numbers as Python's."""
    plain = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            remedy = "a row is a dict of columns; a pandas DataFrame gives them by to_dict('records')"
            raise refused(f"{key}[{index}]", f"is a {type(row).__name__} ({short(row)}): {remedy}")
        plain.append({k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()})
    if not plain:
        raise refused(key, "has no rows")
    return plain
