"""Training from Python: objects where a configuration file has names, and a run's folder as an object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Any, TypeAlias

from grpo_fast.config.keys import ConfigError, Problem
from grpo_fast.config.load import load_config
from grpo_fast.config.lookup import given
from grpo_fast.config.paths import user_path
from grpo_fast.config.record import CONFIG_FILE
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.section import short
from grpo_fast.data import Message
from grpo_fast.data.dataset import prompts_of
from grpo_fast.policy import Policy
from grpo_fast.record.callbacks import Callback
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import EVALUATIONS_FILE, METRICS_FILE, TIMINGS_FILE, held_out_outcome
from grpo_fast.record.report import write_report
from grpo_fast.rollout import Completion, generate_rollout, make_engine, sampling_of
from grpo_fast.run.arguments import trl_places
from grpo_fast.run.export import trained_policy
from grpo_fast.run.inputs import Inputs
from grpo_fast.run.loaded import lora_section
from grpo_fast.run.loop import train as train_as_configured

if TYPE_CHECKING:
    import datasets
    import pandas

    Rows: TypeAlias = Iterable[Mapping[str, Any]] | datasets.Dataset
    Source: TypeAlias = str | Path | Rows | Mapping[str, Any]
    Reward: TypeAlias = str | Callable[..., Any] | Mapping[str, Any]


def train(
    config: str | Path | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    dataset: Source | None = None,
    rewards: Reward | Sequence[Reward] | None = None,
    evaluation: Source | None = None,
    callbacks: Sequence[Callback | type[Callback] | str] | None = None,
    resume: bool | str | Path = False,
    overwrite: bool = False,
    display: bool = True,
    args: Any = None,
    train_dataset: Source | None = None,
    eval_dataset: Source | None = None,
    reward_funcs: Reward | Sequence[Reward] | None = None,
    processing_class: Any = None,
    peft_config: Any = None,
    **settings: Any,
) -> Run:
    """Train a model; `grpo-fast train` with objects where it has names.

    An interruption finishes the step, saves it and raises KeyboardInterrupt; the same call with `resume=True`
    goes on, and `Run(output_dir)` opens what there is.

    Args:
        config: a YAML file, a run's folder or a shipped recipe, which the rest goes over.
        model: a folder, a hub id, the section `model`, or a loaded model of transformers or peft. A loaded
            one is written to `output_dir/inputs/model`, which a resumed run reads, and gets the trained
            weights at the end.
        dataset: rows (dicts of columns, or a `datasets.Dataset`), a file or hub id, or the section
            `dataset`, whose `source` may be rows.
        rewards: a function, `(prompts, completions, **columns) -> list[float | None]`, a callable object, a
            built-in's name, or an entry `{"reward": any of these, "weight": ..., "options": ...}`; or a list.
        evaluation: held-out rows, file or hub id; or the section `evaluation`, whose `dataset` may be any of
            these. It is read as `dataset` is, but for what it sets itself.
        callbacks: objects or classes derived from `grpo_fast.Callback`, or import paths.
        resume: True goes on from the newest checkpoint in `output_dir`, a path from that one.
        overwrite: delete the run in `output_dir`. By default another run's folder stays, and this run's is
            `output_dir-2` and so on.
        display: show progress.
        args: a GRPOConfig of TRL: every field is translated, logged as not used, or refused. With it or
            `train_dataset`, TRL's defaults are used, and prompts of text reach the model as they are.
        train_dataset, eval_dataset, reward_funcs: TRL's names of `dataset`, `evaluation` and `rewards`.
        processing_class: a loaded tokenizer or processor, used in place of the model's.
        peft_config: a LoraConfig of peft.
        settings: further keys of the configuration, sections as dicts, `**{"optimizer.betas": ...}`, TRL's
            names: as in a file. A key that takes an import path takes a function.

    Raises:
        ConfigError: settings or rows that cannot be used; it lists every problem.
        KeyboardInterrupt, SystemExit: a signal stopped it; the last finished step is saved.
        Exception: as `grpo-fast train` reports it.
    """
    inputs = Inputs()
    from_trl = args is not None or train_dataset is not None
    dataset = one_of("dataset", dataset, train_dataset)
    evaluation = one_of("evaluation", evaluation, eval_dataset)
    if from_trl and config is not None:
        problem = "goes without TRL's args and train_dataset; leave them out"
        raise ConfigError("train", [Problem("config", problem, config)])
    inputs.loaded.tokenizer, inputs.loaded.resumes = processing_class, bool(resume)
    if model is not None:
        settings["model"] = inputs.model(model)
    if peft_config is not None:
        settings["model"] = {**settings.get("model", {}), "lora": lora_section(peft_config)}
    if one_of("rewards", rewards, reward_funcs) is reward_funcs is not None:
        settings["reward_funcs"] = inputs.reward_funcs(reward_funcs)
    if dataset is not None:
        settings["dataset"] = inputs.dataset(dataset)
    if rewards is not None:
        settings["rewards"] = inputs.rewards(rewards)
    if evaluation is not None:
        settings["evaluation"] = inputs.evaluation(evaluation)
    if callbacks is not None:
        settings["callbacks"] = callbacks
    settings = inputs.plain(settings)
    base: Any = config
    if from_trl:
        base = trl_places({} if args is None else args, settings)
        if inputs.loaded.model is not None:
            base.pop("model.dtype", None)  # the loaded model's is used
    whole = load_config(base, settings)
    inputs.read(whole)
    if resume and overwrite:
        raise ConfigError("train", [Problem("overwrite", "goes without resume; keep one")])
    checkpoint = "latest" if resume is True else str(resume) if resume else None
    if resume is True and config is not None and user_path(config, "config").is_dir():
        checkpoint = whole.output_dir  # this folder, not the newest next to it
    with given(inputs.objects):
        ended = train_as_configured(
            whole, resume=checkpoint, overwrite=overwrite, display=display, loaded=inputs.loaded
        )
    if ended.stopped_by == SIGINT:
        opened = f"grpo_fast.Run({str(ended.run_dir)!r}) opens the run"
        raise KeyboardInterrupt(f"the last finished step is saved: resume=True goes on, {opened}")
    if ended.stopped_by is not None:
        raise SystemExit(128 + ended.stopped_by)
    return Run(ended.run_dir, trust_remote_code=whole.model.trust_remote_code)


def one_of(name: str, *given: Any) -> Any:
    """Return the value that is given under one of its names."""
    found = [value for value in given if value is not None]
    if len(found) > 1:
        raise ConfigError("train", [Problem(name, "is given twice, here and under TRL's name; keep one")])
    return found[0] if found else None


class Run:
    """A run's folder, while the run goes on and afterwards.

    Args:
        folder: the run's output_dir.
        trust_remote_code: run the Python code of the model's repository, where the run did.

    Raises:
        FileNotFoundError: the folder holds no run.
    """

    def __init__(self, folder: str | Path, *, trust_remote_code: bool = False) -> None:
        self.folder = user_path(folder, "folder")
        if not (self.folder / CONFIG_FILE).is_file():
            raise FileNotFoundError(f"{self.folder} holds no run: there is no {CONFIG_FILE}")
        self.config = load_config(self.folder, {"model.trust_remote_code": trust_remote_code})

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
        return TrainedPolicy(trained_policy(self.config, self.folder)[0], self.config)

    @property
    def report(self) -> Path:
        """The run as an HTML page, written anew."""
        return write_report(self.folder)

    def __repr__(self) -> str:
        steps = [record["step"] for record in read_jsonl(self.folder / METRICS_FILE)]
        done = f"Run({str(self.folder)!r}): step {max(steps, default=0)} of {self.config.max_steps}"
        return ", ".join(filter(None, [done, held_out_outcome(self.folder)]))

    def _repr_html_(self) -> str:
        """The report, in a notebook's cell."""
        page = escape(self.report.read_text(encoding="utf-8"))
        style = "width: 100%; height: 720px; border: 0"
        return f'<p>{escape(repr(self))}</p><iframe srcdoc="{page}" style="{style}"></iframe>'

    def _table(self, name: str) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(read_jsonl(self.folder / name))


class TrainedPolicy:
    """A trained model, with LoRA peft's around it, and its tokenizer."""

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self.model, self.tokenizer = policy.model, policy.tokenizer
        self._policy, self._config = policy, config

    def generate(self, prompts: Sequence[str | list[Message]], **sampling: Any) -> list[Completion]:
        """One completion for each prompt: `[c.text for c in policy.generate(["6 + 31 ="])]`.

        Args:
            prompts: text or conversations, made ready as the run's dataset is, system prompt included.
            sampling: `max_completion_length`, `temperature`, `top_p`, `top_k`, `min_p`, `stop`, `seed`; by
                default as the run's evaluation, which is greedy.

        Raises:
            TypeError: an unknown setting.
            ValueError: prompts that are none, or a setting out of range.
        """
        if isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts):
            raise ValueError(f"prompts = {short(prompts)} is one prompt; give a list of prompts")
        config = self._config
        drawn = sampling_of(config.rollout, config.seed)
        drawn = replace(drawn, **{"temperature": config.evaluation.temperature} | sampling)
        as_they_are: dict[str, Any] = {"prompt_template": None, "rename": {}, "max_prompt_length": None}
        for_messages = {"source": "generate(prompts)"}
        dataset = config.dataset.model_copy(update=as_they_are | for_messages)
        rows = [{dataset.prompt_column: prompt} for prompt in prompts]
        questions = (
            prompts_of(rows, dataset, self.tokenizer, images=self._policy.image_reader) if rows else ()
        )
        ours = config.rollout.model_copy(update={"engine": "transformers"})
        with make_engine(ours, self._policy) as engine:
            return [group[0] for group in generate_rollout(engine, questions, 1, drawn)]

    def save_pretrained(self, folder: str | Path, *, adapter: bool = False) -> None:
        """Write model and tokenizer, adapters merged, for transformers and vLLM.

        Args:
            adapter: write the adapter alone, for peft.

        Raises:
            ValueError: the run has no adapter.
        """
        save = self._policy.save_adapter if adapter else self._policy.save_pretrained
        save(user_path(folder, "folder"))
