"""A run from configuration to report: assembles the parts, resumes, survives signals and full disks."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from grpo_fast.alerts import ALERTS_FILE, AlertMonitor
from grpo_fast.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointSaveError,
    CheckpointStore,
    capture_rng,
    check_writable,
    restore_rng,
)
from grpo_fast.config import TrainConfig
from grpo_fast.config_io import dump_config, load_config
from grpo_fast.data import load_prompts
from grpo_fast.display import Display
from grpo_fast.jsonl import JsonlLog, read_jsonl
from grpo_fast.metrics import EVALUATIONS_FILE, EvaluationLog, MetricsLog, SampleLog, SampleRecord
from grpo_fast.policy import Policy, PolicyOptimizer, load_policy
from grpo_fast.preference.assemble import build_preference_trainer
from grpo_fast.report import write_report
from grpo_fast.rewards import load_rewards
from grpo_fast.rollout import make_engine
from grpo_fast.run_dir import CHECKPOINTS_DIR, CONFIG_FILE
from grpo_fast.stage_parts import build_parts
from grpo_fast.stages import resolve_stages, schedule_steps
from grpo_fast.summary import Interval, Score, before_after
from grpo_fast.trainer import StepResult, Trainer

# What a resumed run may do differently and still be the same run.
CHANGEABLE = {"output_dir", "max_steps", "threads", "checkpoint", "logging", "alerts"}


class Evaluated(Protocol):
    """A held-out score, of whatever an algorithm evaluates."""

    @property
    def n(self) -> int: ...

    @property
    def score(self) -> float: ...

    @property
    def interval(self) -> Interval: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


class Algorithm(Protocol):
    """What a run drives: a trainer of any algorithm."""

    config: TrainConfig
    policy: Policy
    optimizer: PolicyOptimizer
    engine: AbstractContextManager[Any]
    held_out: Sequence[Any]
    step: int

    def train_step(self) -> StepResult: ...

    def evaluate(self, size: int | None = None) -> Evaluated: ...

    def pick_samples(self, result: StepResult, count: int) -> list[SampleRecord]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def train(config: TrainConfig, *, resume: str | None = None, display: bool = True) -> Path:
    """Train as configured; returns the run's directory.

    Args:
        config: the whole run.
        resume: "latest" continues from the newest checkpoint in `config.output_dir`, a path from that one.
        display: show progress; the files of the run are written either way.

    Raises:
        CheckpointError: the directory cannot be written, holds another run, or its newest checkpoint is
            damaged; the message names the remedy.
        ValueError: the configuration contradicts the model or the data. Raised before any training.
    """
    run_dir = Path(config.output_dir)
    check_writable(run_dir, needed_bytes=0)
    store = CheckpointStore(run_dir / CHECKPOINTS_DIR, keep=config.checkpoint.keep)
    checkpoint = find_checkpoint(run_dir, store, config, resume)
    trainer = build_trainer(config)
    if checkpoint is not None:
        restore(trainer, checkpoint)
    check_writable(run_dir, needed_bytes=checkpoint_bytes(trainer))
    (run_dir / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest().listening())
        stack.enter_context(trainer.engine)
        Run(trainer, run_dir, store, stop, stack, checkpoint, display).execute()
    return run_dir


def find_checkpoint(
    run_dir: Path, store: CheckpointStore, config: TrainConfig, resume: str | None
) -> Checkpoint | None:
    """The checkpoint to continue from; none for a new run, or one that was stopped before its first."""
    earlier = run_dir / CONFIG_FILE
    if resume is None:
        if earlier.exists():
            raise CheckpointError(
                f"output_dir = {str(run_dir)!r} already holds a run; continue it with --resume, or choose "
                "another"
            )
        return None
    if not earlier.exists():
        raise CheckpointError(
            f"output_dir = {str(run_dir)!r} holds no run to resume; start it without --resume"
        )
    changed = changed_keys(load_config(earlier, []), config)
    if changed:
        raise CheckpointError(
            f"the run in {str(run_dir)!r} was started with another configuration "
            f"({', '.join(changed)} differ): resume with its own ({earlier}), or start a new run in "
            "another output_dir"
        )
    return store.load_latest() if resume == "latest" else store.load(Path(resume))


def changed_keys(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Sections in which two configurations would train differently."""
    old_values, new_values = old.model_dump(mode="json"), new.model_dump(mode="json")
    return [key for key in new_values if key not in CHANGEABLE and new_values[key] != old_values.get(key)]


def build_trainer(config: TrainConfig) -> Algorithm:
    """Every part that the configuration names, at step 0."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    return build_grpo_trainer(config) if config.algorithm == "grpo" else build_preference_trainer(config)


def build_grpo_trainer(config: TrainConfig) -> Trainer:
    judges = load_rewards(config.rewards)
    stages = resolve_stages(config)
    needs_reference = any(stage.config.loss.needs_reference for stage in stages)
    policy = load_policy(config.model, needs_reference=needs_reference)
    held_out = None
    if config.evaluation.dataset is not None:
        held_out = load_prompts(config.evaluation.dataset, policy.tokenizer)
    return Trainer(
        config,
        policy=policy,
        engine=make_engine(config.rollout, policy),
        optimizer=PolicyOptimizer(
            policy.trainable(), config.optimizer, total_steps=schedule_steps(stages, 0)
        ),
        stages=build_parts(stages, policy.tokenizer, held_out),
        judges=judges,
        held_out=held_out or (),
    )


def restore(trainer: Algorithm, checkpoint: Checkpoint) -> None:
    """Put a trainer where the checkpoint left it."""
    trainer.optimizer.load_state_tensors(checkpoint.tensors["optimizer"])
    trainer.optimizer.load_state(checkpoint.state["optimizer"])
    trainer.load_state_dict(checkpoint.state["trainer"])
    restore_rng(checkpoint.tensors["rng"], checkpoint.state["rng"])
    trainer.step = checkpoint.step


def checkpoint_bytes(trainer: Algorithm) -> int:
    """Size of one checkpoint, the optimizer's two moments and fp32 masters included."""
    return sum(p.numel() * (p.element_size() + 12) for p in trainer.policy.trainable().values())


@dataclass
class StopRequest:
    """Set by SIGINT or SIGTERM: finish the step, save, leave. A second SIGINT interrupts at once."""

    signal: str | None = None

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        def note(number: int, _frame: object) -> None:
            if self.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number).name

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class Run:
    """A trainer with its record on disk and its display."""

    def __init__(
        self,
        trainer: Algorithm,
        run_dir: Path,
        store: CheckpointStore,
        stop: StopRequest,
        stack: ExitStack,
        checkpoint: Checkpoint | None,
        show: bool,
    ) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.run_dir = run_dir
        self.store = store
        self.stop = stop
        self.metrics = MetricsLog(run_dir, self.config.logging, run_name=run_dir.name)
        self.samples = SampleLog(run_dir)
        self.evaluations = EvaluationLog(run_dir)
        self.alerts = JsonlLog(run_dir / ALERTS_FILE)
        self.monitor = AlertMonitor(self.config.alerts)
        if checkpoint:
            self.monitor.load_state_dict(checkpoint.state["alerts"])
        offsets = checkpoint.state["offsets"] if checkpoint else {}
        for name, log in self.logs().items():
            stack.callback(log.close)
            log.truncate(offsets.get(name, 0))
        display = Display(self.config.max_steps, start_step=trainer.step)
        self.display = stack.enter_context(display) if show else None

    def logs(self) -> dict[str, MetricsLog | JsonlLog]:
        return {
            "metrics": self.metrics,
            "samples": self.samples,
            "evaluations": self.evaluations,
            "alerts": self.alerts,
        }

    def execute(self) -> None:
        """Steps until the last one or a stop request; then the score, the checkpoint and the report."""
        trainer, config = self.trainer, self.config
        if trainer.step == 0:
            self.metrics.log(0, self.evaluate(None))
        saved = trainer.step
        while trainer.step < config.max_steps and not self.stop.signal:
            result = trainer.train_step()
            self.record(result)
            if config.checkpoint.every and trainer.step % config.checkpoint.every == 0:
                saved = self.save() or saved
        if saved != trainer.step:
            self.save(must=True)
        if self.stop.signal:
            self.say(f"{self.stop.signal}: saved at step {trainer.step}; continue with --resume")
        self.say(self.outcome())
        self.say(f"report: {write_report(self.run_dir)}")

    def record(self, result: StepResult) -> None:
        """Write and show a finished step, with the held-out score where one is due."""
        step, config = self.trainer.step, self.config
        metrics, timings = result.metrics, result.timings | {"memory/peak_bytes": peak_memory(self.trainer)}
        last = step == config.max_steps
        if last or (config.evaluation.every and step % config.evaluation.every == 0):
            metrics = metrics | self.evaluate(None if last else config.evaluation.size)
        self.metrics.log(step, metrics, timings)
        if config.logging.samples_every and (step - 1) % config.logging.samples_every == 0:
            self.samples.write(step, self.trainer.pick_samples(result, config.logging.samples))
        if self.display:
            self.display.update(step, metrics, timings)
        for alert in self.monitor.update(step, metrics):
            self.alerts.append(alert.record())
            self.say(alert.text)

    def evaluate(self, size: int | None) -> dict[str, float]:
        """Score the held-out questions, write it down, show it."""
        if not self.trainer.held_out:
            return {}
        evaluation = self.trainer.evaluate(size)
        step, n = self.trainer.step, evaluation.n
        name = "held-out" if n == len(self.trainer.held_out) else f"held-out, first {n}"
        self.evaluations.write(step, name, evaluation.score, evaluation.interval, n)
        if self.display:
            self.display.evaluation(step, evaluation.score, evaluation.interval, n)
        return {"eval/score": evaluation.score} | {f"eval/{k}": v for k, v in evaluation.metrics.items()}

    def save(self, *, must: bool = False) -> int | None:
        """Write a checkpoint; a failed one loses nothing, so unless it is the last the run goes on."""
        trainer = self.trainer
        rng_tensors, rng_state = capture_rng()
        try:
            self.store.save(
                trainer.step,
                tensors={
                    "trainable": trainer.policy.trainable(),
                    "optimizer": trainer.optimizer.state_tensors(),
                    "rng": rng_tensors,
                },
                state={
                    "optimizer": trainer.optimizer.state(),
                    "trainer": trainer.state_dict(),
                    "alerts": self.monitor.state_dict(),
                    "rng": rng_state,
                    "offsets": {name: log.offset for name, log in self.logs().items()},
                },
            )
        except CheckpointSaveError as error:
            if must:
                raise
            self.say(f"checkpoint of step {trainer.step} not saved: {error}; training goes on")
            return None
        return trainer.step

    def outcome(self) -> str:
        """Held-out score before → after."""
        scores = [e for e in read_jsonl(self.run_dir / EVALUATIONS_FILE) if e["name"] == "held-out"]
        if len(scores) < 2:
            return f"step {self.trainer.step} of {self.config.max_steps}"
        first, last = (Score(e["score"], tuple(e["interval"]), e["n"]) for e in (scores[0], scores[-1]))
        return f"held-out score: {before_after(first, last)}"

    def say(self, text: str) -> None:
        if self.display:
            self.display.message(text)


def peak_memory(trainer: Algorithm) -> int:
    """Bytes at the highest: of the GPU's allocator, else of the process."""
    if trainer.policy.device.type == "cuda":
        return torch.cuda.max_memory_allocated(trainer.policy.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
