"""Training from Python: objects where a configuration file has names, and a run's folder as an object.

Rows and sources are kept in the run's folder, under names that hold a digest of them. So a configuration says
which objects a run was made of, and a resumed run with others is refused like one with another setting.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from signal import SIGINT, Signals
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import ValidationError

from grpo_fast.config import TrainConfig
from grpo_fast.config_io import ConfigError, Problem, load_config
from grpo_fast.data import Message
from grpo_fast.data.dataset import prompts_of
from grpo_fast.lookup import OBJECT_MARK, choices, given
from grpo_fast.policy import Policy
from grpo_fast.rollout import Completion, Sampling, make_engine, sampling_of
from grpo_fast.run.export import trained_policy
from grpo_fast.run.loop import train as train_as_configured
from grpo_fast.run_record.callbacks import Callback
from grpo_fast.run_record.files import CONFIG_FILE, INPUTS_DIR, read_jsonl
from grpo_fast.run_record.logs import EVALUATIONS_FILE, METRICS_FILE, TIMINGS_FILE
from grpo_fast.run_record.report import write_report
from grpo_fast.run_record.summary import before_after
from grpo_fast.section import short

if TYPE_CHECKING:
    import datasets
    import pandas
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Rows: TypeAlias = Iterable[Mapping[str, Any]] | datasets.Dataset
    Source: TypeAlias = str | Path | Rows | Mapping[str, Any]
    Reward: TypeAlias = str | Callable[..., Any] | Mapping[str, Any]

# What of a `dataset` section says how a row becomes a prompt.
RENDERING = (
    *("prompt_column", "rename", "prompt_template", "chat", "system_prompt", "examples"),
    *("max_prompt_length", "overlong_prompts"),
)


def train(
    config: str | Path | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    dataset: Source | None = None,
    rewards: Reward | Sequence[Reward] | None = None,
    evaluation: Source | None = None,
    callbacks: Sequence[Callback | type[Callback] | str] | None = None,
    resume: bool | str | Path = False,
    display: bool = True,
    **settings: Any,
) -> Run:
    """Train a model; `grpo-fast train` with objects where it has names.

    An interruption finishes the step, saves it and raises KeyboardInterrupt; the same call with `resume=True`
    goes on, and `Run(output_dir)` opens what there is.

    Args:
        config: a YAML file, a run's folder or a shipped recipe, which the rest goes over.
        model: a folder, a hub id, or the section `model`.
        dataset: rows (dicts of columns, or a `datasets.Dataset`), a file or hub id, or the section
            `dataset`, whose `source` may be rows.
        rewards: a function, `(prompts, completions, **columns) -> list[float | None]`, a callable object, a
            built-in's name, or an entry `{"reward": any of these, "weight": ..., "options": ...}`; or a list.
        evaluation: held-out rows, file or hub id, read as the dataset's rows are; or the section
            `evaluation`, whose `dataset` may be any of these.
        callbacks: objects or classes derived from `grpo_fast.Callback`, or import paths.
        resume: True goes on from the newest checkpoint in `output_dir`, a path from that one.
        display: show progress.
        settings: further keys of the configuration, sections as dicts, `**{"optimizer.betas": ...}`, TRL's
            names: as in a file. A key that takes an import path takes a function.

    Raises:
        ConfigError: settings or rows that cannot be used; it lists every problem.
        KeyboardInterrupt: it was interrupted; the last finished step is saved.
        Exception: as `grpo-fast train` reports it.
    """
    inputs = Inputs()
    if model is not None:
        settings["model"] = inputs.model(model)
    if dataset is not None:
        settings["dataset"] = inputs.dataset(dataset)
    if rewards is not None:
        settings["rewards"] = inputs.rewards(rewards)
    if evaluation is not None:
        settings["evaluation"] = inputs.evaluation(evaluation)
    if callbacks is not None:
        settings["callbacks"] = callbacks
    whole = load_config(config, inputs.plain(settings))
    whole = inputs.placed(whole, like_dataset=not isinstance(evaluation, Mapping | None))
    checkpoint = "latest" if resume is True else str(resume) if resume else None
    with given(inputs.objects):
        ended = train_as_configured(whole, resume=checkpoint, display=display, files=inputs.files)
    if ended.stopped_by is not None:
        raise _interruption(ended.stopped_by, ended.run_dir)
    return Run(ended.run_dir)


def _interruption(signal: Signals, run_dir: Path) -> BaseException:
    """What a script that does nothing about it ends by, with the signal's exit code."""
    if signal != SIGINT:
        return SystemExit(128 + signal)
    opened = f"grpo_fast.Run({str(run_dir)!r}) opens the run"
    return KeyboardInterrupt(f"the last finished step is saved: resume=True goes on, {opened}")


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
        if isinstance(value, str | Path):
            return {"path": value}
        if isinstance(value, Mapping):
            return value
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
        content = "".join(lines).encode()
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


def _refused(key: str, problem: str) -> ConfigError:
    return ConfigError("train", [Problem(key, problem)])


def _json_line(row: Any, place: str) -> str:
    if not isinstance(row, Mapping):
        remedy = "a row is a dict of columns; a pandas DataFrame gives them by to_dict('records')"
        raise _refused(place, f"is a {type(row).__name__} ({short(row)}): {remedy}")

    def encode(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=lambda array: array.tolist())

    try:
        return encode(row) + "\n"
    except (TypeError, ValueError, AttributeError):
        for column, value in row.items():
            try:
                encode(value)
            except (TypeError, ValueError, AttributeError):
                problem = f"holds {short(value)}, which JSON has not: make it text or a finite number"
                raise _refused(f"{place}[{column!r}]", problem) from None
        raise


class Run:
    """A run's folder, while the run goes on and afterwards.

    Raises:
        FileNotFoundError: the folder holds no run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / CONFIG_FILE).is_file():
            raise FileNotFoundError(f"{self.folder} holds no run: there is no {CONFIG_FILE}")
        self.config = load_config(self.folder)

    @property
    def metrics(self) -> pandas.DataFrame:
        """A row for each step from 0, a column for each metric and timing."""
        metrics, timings = self._table(METRICS_FILE), self._table(TIMINGS_FILE)
        return metrics.set_index("step").join(timings.set_index("step")) if len(timings) else metrics

    @property
    def evaluations(self) -> pandas.DataFrame:
        """A row for each held-out score: `step`, `name`, `score`, `interval` (95 %), `n` questions."""
        return self._table(EVALUATIONS_FILE)

    @cached_property
    def policy(self) -> TrainedPolicy:
        """The model of the newest checkpoint.

        Raises:
            FileNotFoundError: there is none yet.
        """
        return TrainedPolicy(trained_policy(self.config, self.folder), self.config)

    @property
    def report(self) -> Path:
        """The run as an HTML page, written anew."""
        return write_report(self.folder)

    def __repr__(self) -> str:
        records = read_jsonl(self.folder / METRICS_FILE)
        done = f"step {records[-1]['step'] if records else 0} of {self.config.max_steps}"
        scores = [e for e in read_jsonl(self.folder / EVALUATIONS_FILE) if e["name"] == "held-out"]
        measured = f", held-out score: {before_after(scores[0], scores[-1])}" if len(scores) > 1 else ""
        return f"Run({str(self.folder)!r}): {done}{measured}"

    def _repr_html_(self) -> str:
        """The report, in a notebook's cell."""
        page = escape(self.report.read_text(encoding="utf-8"))
        style = "width: 100%; height: 720px; border: 0"
        return f'<p>{escape(repr(self))}</p><iframe srcdoc="{page}" style="{style}"></iframe>'

    def _table(self, name: str) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(read_jsonl(self.folder / name))


class TrainedPolicy:
    """A trained model and its tokenizer."""

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self._policy = policy
        self._config = config

    @property
    def model(self) -> PreTrainedModel:
        return self._policy.base_model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._policy.tokenizer

    def generate(self, prompts: Sequence[str | list[Message]], **sampling: Any) -> list[Completion]:
        """One completion for each prompt: `[c.text for c in policy.generate(["6 + 31 ="])]`.

        Args:
            prompts: text or conversations, made ready as the run's dataset is, system prompt included.
            sampling: `max_completion_length`, `temperature`, `top_p`, `top_k`, `min_p`, `stop`, `seed`; by
                default as the run's evaluation, which is greedy.

        Raises:
            ValueError: prompts that are none, or a setting that is unknown or out of range.
        """
        if isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts):
            raise ValueError(f"prompts = {short(prompts)} is one prompt; give a list of prompts")
        config, known = self._config, Sampling.__dataclass_fields__
        for name in sampling:
            if name not in known:
                raise ValueError(f"generate has no setting {name!r}: {choices(name, known)}")
        as_evaluated: dict[str, Any] = {"temperature": config.evaluation.temperature, "seed": config.seed}
        as_evaluated["max_completion_length"] = config.rollout.length_limit
        try:
            drawn = replace(sampling_of(config.rollout), **as_evaluated | sampling)
        except ValidationError as error:
            problems = (f"{item['loc'][0]} = {item['input']!r}: {item['msg']}" for item in error.errors())
            raise ValueError("; ".join(problems)) from None
        as_they_are: dict[str, Any] = {"prompt_template": None, "rename": {}, "max_prompt_length": None}
        dataset = config.dataset.model_copy(update=as_they_are)
        rows = [{dataset.prompt_column: prompt} for prompt in prompts]
        questions = prompts_of(rows, dataset, self.tokenizer) if rows else ()
        ours = config.rollout.model_copy(update={"engine": "transformers"})
        with make_engine(ours, self._policy) as engine:
            return [group[0] for group in engine.generate([q.token_ids for q in questions], 1, drawn)]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model and tokenizer, adapters merged, for transformers and vLLM."""
        self._policy.save_pretrained(Path(folder))
