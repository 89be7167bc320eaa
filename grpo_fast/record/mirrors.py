"""Send metrics and completions to TensorBoard, Weights & Biases and trackio."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from grpo_fast.config.record import CONFIG_FILE, LoggingConfig

if TYPE_CHECKING:
    from grpo_fast.record.logs import SampleRecord

Rows: TypeAlias = list[dict[str, Any]]  # of a table, by column


class TensorBoard:
    """Scalars in `run_dir/tensorboard`, and completions as YAML for the text plugin."""

    def __init__(self, run_dir: Path, project: str) -> None:
        self._dir = run_dir / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all; `add_scalar` would write one each.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._open(step)._get_file_writer().add_summary(Summary(value=values), step)
        self._open(step).flush()

    def table(self, step: int, rows: Rows) -> None:
        text = yaml.safe_dump(rows, sort_keys=False, allow_unicode=True, width=1000)
        self._open(step).add_text(
            "samples", indent(text, "    "), step
        )  # indented, so that nothing is markup

    def _open(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides steps that a killed run has written, and that run again now.
            self._writer = SummaryWriter(str(self._dir), purge_step=step if self._dir.exists() else None)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of Weights & Biases; a resumed run continues it by the id in the run's folder."""

    library = "wandb"

    def __init__(self, run_dir: Path, project: str) -> None:
        self._service = import_module(self.library)
        id_file, config_file = run_dir / f"{self.library}_id", run_dir / CONFIG_FILE
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        config = yaml.safe_load(config_file.read_text("utf-8")) if config_file.exists() else None
        self._start(run_dir, id_file.read_text().strip(), resume="allow", project=project, config=config)

    def _start(self, run_dir: Path, run_id: str, **settings: Any) -> None:
        self._run = self._service.init(name=run_dir.name, id=run_id, dir=str(run_dir), **settings)
        # W&B's own step must not go back, as in a resumed run, hence an axis of ours.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, step: int, rows: Rows) -> None:
        data = [[*row.values()] for row in rows]
        self.log(step, {"samples": self._service.Table(columns=[*rows[0]], data=data)})

    def close(self) -> None:
        self._run.finish()


class Trackio(Wandb):
    """A run of trackio, whose functions are W&B's, and which identifies runs by name."""

    library = "trackio"

    def _start(self, run_dir: Path, run_id: str, **settings: Any) -> None:
        self._run = self._service.init(name=f"{run_dir.name}-{run_id}", **settings)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)


KINDS: dict[str, type[Any]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
"""Mirrors by library; the libraries are keys of the section `logging`."""


def require_mirrors(config: LoggingConfig) -> None:
    """Raise ModuleNotFoundError for a mirror whose library is missing."""
    for library in (name for name in KINDS if getattr(config, name)):
        try:
            import_module(library)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"logging.{library} = true needs `pip install {library}`; or set logging.{library} = false"
            ) from error


def table_of(samples: Sequence[SampleRecord]) -> Rows:
    """Return a row for each completion, with a column for each reward."""
    rows = []
    for sample in samples:
        prompt, completion = (
            text.encode("utf-8", "backslashreplace").decode() for text in (sample.prompt, sample.completion)
        )
        row = {"group": sample.group, "prompt": prompt, "completion": completion, **sample.rewards}
        row |= {"reward": sample.reward, "advantage": sample.advantage}
        rows.append(row | {"tokens": sample.num_tokens, "truncated": sample.truncated})
    return rows
