"""Copies of the metrics for TensorBoard, Weights & Biases and trackio. The run directory is the record."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from grpo_fast.run_record.files import CONFIG_FILE

if TYPE_CHECKING:
    from grpo_fast.run_record.config import LoggingConfig


class Mirror(Protocol):
    """Somewhere else that metrics are shown."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardMirror:
    """Scalars in `run_dir/tensorboard`."""

    def __init__(self, run_dir: Path) -> None:
        self._writer_class = _import("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter
        self._dir = run_dir / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            # A run that was killed may have shown steps that are now run again: purge_step hides them.
            self._writer = self._writer_class(str(self._dir), purge_step=step if self._dir.exists() else None)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbMirror:
    """A Weights & Biases run; a resumed run continues it."""

    def __init__(self, run_dir: Path, config: LoggingConfig, run_name: str) -> None:
        wandb = _import("wandb", "wandb", "wandb")
        self._run = wandb.init(
            project=config.project,
            name=run_name,
            id=_run_id(run_dir / "wandb_id"),
            resume="allow",
            dir=str(run_dir),
            config=_run_config(run_dir),
        )
        # W&B's own step only grows and drops what a resumed run shows again, hence an axis of ours.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class TrackioMirror:
    """A trackio run; a resumed run continues it."""

    def __init__(self, run_dir: Path, config: LoggingConfig, run_name: str) -> None:
        trackio = _import("trackio", "trackio", "trackio")
        name = f"{run_name}-{_run_id(run_dir / 'trackio_id')}"
        self._run = trackio.init(
            project=config.project, name=name, resume="allow", config=_run_config(run_dir)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class GuardedMirror:
    """A mirror whose failure costs a warning, never the run."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror: Mirror | None = mirror

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._guard("log", step, metrics)

    def close(self) -> None:
        self._guard("close")
        self._mirror = None

    def _guard(self, verb: str, *args: Any) -> None:
        if self._mirror is None:
            return
        try:
            getattr(self._mirror, verb)(*args)
        except Exception as error:
            name = type(self._mirror).__name__.removesuffix("Mirror")
            warnings.warn(
                f"{name} failed ({error!r}) and gets no more metrics; metrics.jsonl has all of them",
                RuntimeWarning,
                stacklevel=4,
            )
            self._mirror = None


def open_mirrors(run_dir: Path, config: LoggingConfig, run_name: str) -> list[Mirror]:
    """The mirrors that the configuration asks for.

    Raises:
        ModuleNotFoundError: one's library is missing; the message says what to install.
    """
    mirrors: list[Mirror] = []
    if config.tensorboard:
        mirrors.append(TensorBoardMirror(run_dir))
    if config.wandb:
        mirrors.append(WandbMirror(run_dir, config, run_name))
    if config.trackio:
        mirrors.append(TrackioMirror(run_dir, config, run_name))
    return [GuardedMirror(mirror) for mirror in mirrors]


def _import(module: str, package: str, option: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"logging.{option} = true needs `pip install {package}`; or set logging.{option} = false"
        ) from error


def _run_id(path: Path) -> str:
    """A name for this run in a service: made once, kept beside the run."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text().strip()


def _run_config(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / CONFIG_FILE
    return yaml.safe_load(path.read_text("utf-8")) if path.exists() else None
