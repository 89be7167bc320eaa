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

Table: TypeAlias = tuple[list[str], list[list[Any]]]  # columns and rows


class TensorBoard:
    """Scalars in `run_dir/tensorboard`, and completions as YAML for the text plugin."""

    def __init__(self, run_dir: Path, project: str) -> None:
        self._dir = run_dir / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._open(step).add_scalar(name, value, step)
        self._open(step).flush()

    def table(self, step: int, table: Table) -> None:
        columns, rows = table
        named = [dict(zip(columns, row, strict=True)) for row in rows]
        text = yaml.safe_dump(named, sort_keys=False, allow_unicode=True, width=1000)
        self._open(step).add_text("samples", indent(text, "    "), step)  # indented, no text is markup

    def _open(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A killed run may have shown steps that are now run again; purge_step hides them.
            self._writer = SummaryWriter(str(self._dir), purge_step=step if self._dir.exists() else None)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of Weights & Biases; a resumed run continues it by the id that the run's folder keeps."""

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
        # W&B's own step only grows and drops what a resumed run logs again, hence an axis of ours.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, step: int, table: Table) -> None:
        columns, rows = table
        self.log(step, {"samples": self._service.Table(columns=columns, data=rows)})

    def close(self) -> None:
        self._run.finish()


class Trackio(Wandb):
    """A run of trackio, which has W&B's functions and knows runs by their names."""

    library = "trackio"

    def _start(self, run_dir: Path, run_id: str, **settings: Any) -> None:
        self._run = self._service.init(name=f"{run_dir.name}-{run_id}", **settings)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)


Mirror: TypeAlias = TensorBoard | Wandb
KINDS: dict[str, type[Mirror]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
"""By library, which is also the key in the section `logging`."""


def require_mirrors(config: LoggingConfig) -> None:
    """Raise ModuleNotFoundError, before the model is loaded, for a mirror whose library is missing."""
    for library in (name for name in KINDS if getattr(config, name)):
        try:
            import_module(library)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"logging.{library} = true needs `pip install {library}`; or set logging.{library} = false"
            ) from error


def open_mirrors(run_dir: Path, config: LoggingConfig) -> list[Mirror]:
    """Return the mirrors that the configuration asks for; raise RuntimeError where one does not start."""
    mirrors: list[Mirror] = []
    for library in (name for name in KINDS if getattr(config, name)):
        try:
            mirrors.append(KINDS[library](run_dir, config.project))
        except Exception as error:
            remedy = f"mend that, or set logging.{library} = false"
            raise RuntimeError(f"logging.{library} = true: it does not start ({error}); {remedy}") from error
    return mirrors


def table_of(samples: Sequence[SampleRecord]) -> Table:
    """Return a row for each of at least one completion, its rewards in columns of their own."""
    names = list(samples[0].rewards)
    columns = ["group", "prompt", "completion", *names, "reward", "advantage", "tokens", "truncated"]
    rows = []
    for s in samples:
        rewards = [s.rewards[name] for name in names]
        texts = [text.encode("utf-8", "backslashreplace").decode() for text in (s.prompt, s.completion)]
        rows.append([s.group, *texts, *rewards, s.reward, s.advantage, s.num_tokens, s.truncated])
    return columns, rows
