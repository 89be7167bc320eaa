"""Train from Python with objects in the place of names, and open a run's folder as an object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Any, TypeAlias

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
from grpo_fast.run.arguments import refused, trl_places
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
    """Train a model as `grpo-fast train` does, with objects in the place of names.

    An interruption finishes and saves the step, and raises KeyboardInterrupt. The same call with
    `resume=True` continues, and `Run(output_dir)` opens the run.

    Args:
        config: a YAML file, a run's folder or a shipped recipe; the other arguments override it.
        model: a folder, a hub id, the section `model`, or a loaded model of transformers or peft. A loaded
            model is written to `output_dir/inputs/model`, and gets the trained weights at the end.
        dataset: rows (dicts of columns, or a `datasets.Dataset`), a file, a hub id, or the section `dataset`,
            whose `source` may be rows.
        rewards: a function, `(prompts, completions, **columns) -> list[float | None]`, a callable object, a
            built-in's name, or an entry `{"reward": any of these, "weight": ..., "options": ...}`; or a list.
        evaluation: held-out rows, a file, a hub id, or the section `evaluation`, whose `dataset` may be any
            of these. Keys that it does not set are those of `dataset`.
        callbacks: objects or classes derived from `grpo_fast.Callback`, or import paths.
        resume: True continues from the newest checkpoint in `output_dir`, a path from that checkpoint.
        overwrite: delete the run in `output_dir`. By default it stays, and this run's folder is
            `output_dir-2` and so on.
        display: show progress.
        args: a GRPOConfig of TRL: every field is translated, logged as not used, or refused. With it or
            `train_dataset`, TRL's defaults apply, and text prompts reach the model unchanged.
        train_dataset: TRL's name for `dataset`.
        eval_dataset: TRL's name for `evaluation`.
        reward_funcs: TRL's name for `rewards`.
        processing_class: a loaded tokenizer or processor, used in place of the model's.
        peft_config: a LoraConfig of peft.
        settings: further keys of the configuration as in a file: sections as dicts,
            `**{"optimizer.betas": ...}`, TRL's names. A key that takes an import path also takes a function.

    Raises:
        ConfigError: settings or rows that cannot be used; it lists every problem.
        KeyboardInterrupt, SystemExit: a signal stopped the run; the last finished step is saved.
        Exception: any error of the run.
    """
    if resume and overwrite:
        raise refused("overwrite", "goes without resume; keep one")
    inputs = Inputs()
    base: Any = config
    inputs.loaded.tokenizer, inputs.loaded.resumes = processing_class, bool(resume)
    from_trl = args is not None or train_dataset is not None
    if from_trl and config is not None:
        raise refused("config", "goes without TRL's args and train_dataset; leave them out", config)
    one_of("rewards", rewards, reward_funcs)
    for name, value, section in (
        ("model", model, inputs.model),
        ("dataset", one_of("dataset", dataset, train_dataset), inputs.dataset),
        ("rewards", rewards, inputs.rewards),
        ("reward_funcs", reward_funcs, inputs.reward_funcs),
        ("evaluation", one_of("evaluation", evaluation, eval_dataset), inputs.evaluation),
        ("callbacks", callbacks, inputs.plain),
    ):
        if value is not None:
            settings[name] = section(value)
    if peft_config is not None:
        settings["model"] = {**settings.get("model", {}), "lora": lora_section(peft_config)}
    settings = inputs.plain(settings)
    if from_trl:
        base = trl_places({} if args is None else args, settings)
        if inputs.loaded.model is not None:
            base.pop("model.dtype", None)  # the loaded model's is used
    whole = load_config(base, settings)
    inputs.read(whole)
    checkpoint = "latest" if resume is True else str(resume) if resume else None
    if resume is True and config is not None and user_path(config, "config").is_dir():
        checkpoint = whole.output_dir  # not the newest folder next to it
    options: Any = {"overwrite": overwrite, "display": display, "loaded": inputs.loaded}
    with given(inputs.objects):
        ended = train_as_configured(whole, resume=checkpoint, **options)
    if ended.stopped_by == SIGINT:
        opened = f"grpo_fast.Run({str(ended.run_dir)!r}) opens the run"
        raise KeyboardInterrupt(f"the last finished step is saved: resume=True goes on, {opened}")
    if ended.stopped_by is not None:
        raise SystemExit(128 + ended.stopped_by)
    return Run(ended.run_dir, trust_remote_code=whole.model.trust_remote_code)


def one_of(name: str, ours: Any, theirs: Any) -> Any:
    """Return the value that is given under our name or under TRL's."""
    if ours is not None and theirs is not None:
        raise refused(name, "is given twice, here and under TRL's name; keep one")
    return theirs if ours is None else ours


class Run:
    """A run's folder, during the run and afterwards.

    Args:
        folder: the run's output_dir.
        trust_remote_code: run the Python code of the model's repository.

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
        """Metrics and timings: a row for each step from 0, a column for each name."""
        metrics, timings = self._table(METRICS_FILE), self._table(TIMINGS_FILE)
        return metrics.set_index("step").join(timings.set_index("step")) if len(timings) else metrics

    @property
    def evaluations(self) -> pandas.DataFrame:
        """Held-out scores, a row each: `step`, `name`, `score`, `interval` (95 %), `n` questions."""
        return self._table(EVALUATIONS_FILE)

    @cached_property
    def policy(self) -> TrainedPolicy:
        """The model of the newest checkpoint; FileNotFoundError where there is none yet."""
        return TrainedPolicy(trained_policy(self.config, self.folder)[0], self.config)

    @property
    def report(self) -> Path:
        """The run as an HTML page, written at each access."""
        return write_report(self.folder)

    def __repr__(self) -> str:
        steps = [record["step"] for record in read_jsonl(self.folder / METRICS_FILE)]
        done = f"Run({str(self.folder)!r}): step {max(steps, default=0)} of {self.config.max_steps}"
        return ", ".join(filter(None, [done, held_out_outcome(self.folder)]))

    def _repr_html_(self) -> str:
        """Show the report in a notebook."""
        page = escape(self.report.read_text(encoding="utf-8"))
        style = "width: 100%; height: 720px; border: 0"
        return f'<p>{escape(repr(self))}</p><iframe srcdoc="{page}" style="{style}"></iframe>'

    def _table(self, name: str) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(read_jsonl(self.folder / name))


class TrainedPolicy:
    """A trained model (with LoRA, peft's wrapper) and its tokenizer."""

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self.model, self.tokenizer = policy.model, policy.tokenizer
        self._policy, self._config = policy, config

    def generate(self, prompts: Sequence[str | list[Message]], **sampling: Any) -> list[Completion]:
        """Return one completion of each prompt: `[c.text for c in policy.generate(["6 + 31 ="])]`.

        Args:
            prompts: text or conversations, rendered as the run's dataset, system prompt included.
            sampling: `max_completion_length`, `temperature`, `top_p`, `top_k`, `min_p`, `stop`, `seed`; by
                default those of the run's evaluation, which is greedy.

        Raises:
            TypeError: an unknown setting.
            ValueError: malformed prompts, or a setting out of range.
        """
        if isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts):
            raise ValueError(f"prompts = {short(prompts)} is one prompt; give a list of prompts")
        if not prompts:
            return []
        config, images = self._config, self._policy.image_reader
        settings = {"temperature": config.evaluation.temperature} | sampling
        as_given: dict[str, Any] = {"prompt_template": None, "rename": {}, "max_prompt_length": None}
        dataset = config.dataset.model_copy(update=as_given | {"source": "generate(prompts)"})
        rows = [{dataset.prompt_column: prompt} for prompt in prompts]
        questions = prompts_of(rows, dataset, self.tokenizer, images=images)
        chosen = replace(sampling_of(config.rollout, config.seed), **settings)
        rollout = config.rollout.model_copy(update={"engine": "transformers"})
        with make_engine(rollout, self._policy) as engine:
            return [group[0] for group in generate_rollout(engine, questions, 1, chosen)]

    def save_pretrained(self, folder: str | Path, *, adapter: bool = False) -> None:
        """Write model and tokenizer for transformers and vLLM, with merged adapters, or only the adapter."""
        save = self._policy.save_adapter if adapter else self._policy.save_pretrained
        save(user_path(folder, "folder"))
