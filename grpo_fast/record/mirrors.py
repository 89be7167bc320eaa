"""Metrics and completions for TensorBoard, Weights & Biases and trackio. The run directory is the record."""

from __future__ import annotations

import html
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from grpo_fast.config.record import CONFIG_FILE, LoggingConfig

if TYPE_CHECKING:
    from grpo_fast.record.logs import SampleRecord


class TensorBoard:
    """Scalars in `run_dir/tensorboard`, completions as Markdown, which the text plugin shows."""

    def __init__(self, run_dir: Path, project: str) -> None:
        self._dir = run_dir / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._open(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """What the model wrote is no markup of it."""
        cells = [[_cell(value) for value in row] for row in (columns, ["---"] * len(columns), *rows)]
        self._open(step).add_text("samples", "\n".join(f"| {' | '.join(row)} |" for row in cells), step)

    def _open(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A run that was killed may have shown steps that are now run again: purge_step hides them.
            self._writer = SummaryWriter(str(self._dir), purge_step=step if self._dir.exists() else None)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return html.escape(str(value)).replace("|", "&#124;").replace("\n", "<br>")


class Wandb:
    """A run of Weights & Biases; a resumed run continues it by its id, which is kept beside the run."""

    def __init__(self, run_dir: Path, project: str) -> None:
        name = type(self).__name__.lower()
        self._service = import_module(name)
        id_file, config_file = run_dir / f"{name}_id", run_dir / CONFIG_FILE
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        config = yaml.safe_load(config_file.read_text("utf-8")) if config_file.exists() else None
        self._run = self._start(run_dir, id_file.read_text().strip(), project=project, config=config)

    def _start(self, run_dir: Path, run_id: str, **settings: Any) -> Any:
        named = {"name": run_dir.name, "id": run_id, "dir": str(run_dir)}
        run = self._service.init(resume="allow", **named, **settings)
        # W&B's own step only grows and drops what a resumed run shows again, hence an axis of ours.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.log(step, {"samples": self._service.Table(columns=list(columns), data=rows)})

    def close(self) -> None:
        self._run.finish()


class Trackio(Wandb):
    """A run of trackio, which takes W&B's calls; its runs are known by their names."""

    def _start(self, run_dir: Path, run_id: str, **settings: Any) -> Any:
        return self._service.init(resume="allow", name=f"{run_dir.name}-{run_id}", **settings)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)


Mirror: TypeAlias = TensorBoard | Wandb
KINDS: dict[str, type[Mirror]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
"""By library, which is also the key in the section `logging`."""


def require_mirrors(config: LoggingConfig) -> None:
    """Fail before the model is loaded where `open_mirrors` would afterwards.

    Raises:
        ModuleNotFoundError: a mirror's library is missing; the message says what to install.
    """
    for library in (name for name in KINDS if getattr(config, name)):
        try:
            import_module(library)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"logging.{library} = true needs `pip install {library}`; or set logging.{library} = false"
            ) from error


def open_mirrors(run_dir: Path, config: LoggingConfig) -> list[Mirror]:
    """The mirrors that the configuration asks for.

    Raises:
        RuntimeError: one does not start, as where nobody is logged in.
    """
    mirrors: list[Mirror] = []
    for library in (name for name in KINDS if getattr(config, name)):
        try:
            mirrors.append(KINDS[library](run_dir, config.project))
        except Exception as error:
            raise RuntimeError(
                f"logging.{library} = true: {library} does not start ({error}); mend that, or set "
                f"logging.{library} = false"
            ) from error
    return mirrors


def table_of(samples: Sequence[SampleRecord]) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of at least one completion: a row each, its rewards in columns of their own."""
    names = list(samples[0].rewards)
    columns = ["group", "prompt", "completion", *names, "reward", "advantage", "tokens", "truncated"]
    rows = []
    for s in samples:
        rewards = [s.rewards[name] for name in names]
        texts = [text.encode("utf-8", "backslashreplace").decode() for text in (s.prompt, s.completion)]
        rows.append([s.group, *texts, *rewards, s.reward, s.advantage, s.num_tokens, s.truncated])
    return columns, rows
