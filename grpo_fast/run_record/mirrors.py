"""Metrics and completions for TensorBoard, Weights & Biases and trackio. The run directory is the record."""

from __future__ import annotations

import html
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field, model_validator

from grpo_fast.run_record.files import CONFIG_FILE
from grpo_fast.section import Count, PositiveInt, Section

logger = logging.getLogger(__name__)

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}

if TYPE_CHECKING:
    from grpo_fast.run_record.logs import SampleRecord


class LoggingConfig(Section):
    """What a run writes down, and for whom."""

    every: PositiveInt = Field(1, description="steps between those that the mirrors get")
    verbose: bool = Field(False, description="print every metric of a step; `--verbose`")
    samples_every: Count = Field(5, description="steps between those whose completions are kept; 0: none")
    samples: PositiveInt = Field(
        4, description="prompts whose completions are kept: the first's all, one of each other"
    )
    show_samples: Count = Field(
        0, description="of these prompts, how many are printed, each with a completion"
    )
    tensorboard: bool = Field(True, description="metrics to tensorboard/ in the run's folder")
    wandb: bool = Field(False, description="metrics to Weights & Biases")
    trackio: bool = Field(False, description="metrics to trackio")
    project: str = Field("grpo_fast", description="of wandb and trackio")

    @model_validator(mode="after")
    def _shows_what_is_kept(self) -> LoggingConfig:
        if self.show_samples > (self.samples if self.samples_every else 0):
            raise ValueError(
                f"show_samples = {self.show_samples} prompts are more than are kept: raise logging.samples = "
                f"{self.samples}, and set logging.samples_every = {self.samples_every} above 0"
            )
        return self


def require_mirrors(config: LoggingConfig) -> None:
    """Fail before the model is loaded where `Mirrors` would afterwards.

    Raises:
        ModuleNotFoundError: a mirror's library is missing; the message says what to install.
    """
    for option, module in MODULES.items():
        if getattr(config, option):
            try:
                import_module(module)
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(
                    f"logging.{option} = true needs `pip install {option}`; or set logging.{option} = false"
                ) from error


class Mirrors:
    """The mirrors that the configuration asks for. One that fails later costs a warning, never the run.

    Raises:
        ModuleNotFoundError: as `require_mirrors`.
        RuntimeError: one does not start, as where nobody is logged in.
    """

    def __init__(self, run_dir: Path, config: LoggingConfig, run_name: str) -> None:
        require_mirrors(config)
        self._mirrors: list[TensorBoard | Wandb | Trackio] = []
        for kind in (TensorBoard, Wandb, Trackio):
            option = kind.__name__.lower()
            if getattr(config, option):
                try:
                    self._mirrors.append(kind(run_dir, config.project, run_name))
                except Exception as error:
                    raise RuntimeError(
                        f"logging.{option} = true: {option} does not start ({error}); mend that, or set "
                        f"logging.{option} = false"
                    ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda mirror: mirror.log(step, metrics))

    def samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """A table of completions: a row each, its rewards in columns of their own."""
        if samples:
            names = list(samples[0].rewards)
            columns = ["group", "prompt", "completion", *names, "reward", "advantage", "tokens", "truncated"]
            rows = []
            for s in samples:
                rewards = [s.rewards[name] for name in names]
                texts = [t.encode("utf-8", "backslashreplace").decode() for t in (s.prompt, s.completion)]
                rows.append([s.group, *texts, *rewards, s.reward, s.advantage, s.num_tokens, s.truncated])
            self._each(lambda mirror: mirror.table(step, columns, rows))

    def close(self) -> None:
        self._each(lambda mirror: mirror.close())
        self._mirrors = []

    def _each(self, call: Callable[[TensorBoard | Wandb | Trackio], None]) -> None:
        for mirror in list(self._mirrors):
            try:
                call(mirror)
            except Exception as error:
                self._mirrors.remove(mirror)
                name, has_all = type(mirror).__name__, "metrics.jsonl and samples.jsonl have everything"
                logger.warning("%s failed (%r) and gets nothing more; %s", name, error, has_all)


class TensorBoard:
    """Scalars in `run_dir/tensorboard`."""

    def __init__(self, run_dir: Path, _project: str, _name: str) -> None:
        self._writer_class = import_module(MODULES["tensorboard"]).SummaryWriter
        self._dir = run_dir / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._open(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """As Markdown, which the text plugin shows; what the model wrote is no markup of it."""
        cells = [[_cell(value) for value in row] for row in (columns, ["---"] * len(columns), *rows)]
        self._open(step).add_text("samples", "\n".join(f"| {' | '.join(row)} |" for row in cells), step)

    def _open(self, step: int) -> Any:
        if self._writer is None:
            # A run that was killed may have shown steps that are now run again: purge_step hides them.
            self._writer = self._writer_class(str(self._dir), purge_step=step if self._dir.exists() else None)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return html.escape(str(value)).replace("|", "&#124;").replace("\n", "<br>")


class _Service:
    """A run of a tracking service; a resumed run continues it."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        path = run_dir / CONFIG_FILE
        config = yaml.safe_load(path.read_text("utf-8")) if path.exists() else None
        self._service = import_module(type(self).__name__.lower())
        self._run = self._service.init(resume="allow", config=config, **settings)

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.log(step, {"samples": self._service.Table(columns=list(columns), data=rows)})

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._run.finish()


class Wandb(_Service):
    def __init__(self, run_dir: Path, project: str, name: str) -> None:
        super().__init__(
            run_dir, project=project, name=name, id=_run_id(run_dir / "wandb_id"), dir=str(run_dir)
        )
        # W&B's own step only grows and drops what a resumed run shows again, hence an axis of ours.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **metrics})


class Trackio(_Service):
    def __init__(self, run_dir: Path, project: str, name: str) -> None:
        super().__init__(run_dir, project=project, name=f"{name}-{_run_id(run_dir / 'trackio_id')}")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)


def _run_id(path: Path) -> str:
    """A name for this run in a service: made once, kept beside the run."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text().strip()
